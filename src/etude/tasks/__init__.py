"""From a repository to a dataset of gated tasks: code is broken, and hidden tests decide whether an agent mended it.

The room imports `grading`, `sandbox`, `code` and the foundations, never torch. Public: `build.build` makes a dataset,
`check.check` runs its gates again, `dataset.load` reads it, `impossible.make` gives the impossible tasks of a dataset.
"""
