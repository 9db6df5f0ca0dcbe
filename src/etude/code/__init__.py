"""Tools for source text: languages and their syntax, functions, mutation, packages, licences, Markdown tables.

Tasks and training text are made with these modules. They import only `errors` from etude, and run no code of the
repositories that they read. `functions` has the layout of a Python repository, `mutate` is the one mutation engine.
"""

from etude.code.markdown import table

PUBLIC = (
    "",
    "declared",
    "extras",
    "functions",
    "git",
    "languages",
    "licence",
    "mutate",
    "operators",
    "packages",
    "shingles",
)
