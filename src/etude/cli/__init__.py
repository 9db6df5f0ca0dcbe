"""The command line: a file per command, each with `add(parser)` and `run(arguments, rest)`; see `main`.

The room imports every other room, inside of functions where that costs time, and no room imports it.
"""

PUBLIC = ()
