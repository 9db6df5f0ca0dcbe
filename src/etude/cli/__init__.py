"""The command line: a file per command, each with `add(parser)` and `run(arguments, rest)`; see `main`.

The room imports every other one, inside of functions where that costs time, and nothing imports it.
"""

PUBLIC = ()
