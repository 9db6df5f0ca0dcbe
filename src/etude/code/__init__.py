"""Tools for source text: languages and their syntax, functions, mutation, packages, licences, Markdown tables.

Tasks and training text are made with these modules. They import only `errors` from etude, and run no code of the
repositories that they read. Public: `functions` (the layout of a Python repository and its functions), `mutate` (the
one mutation engine), `languages`, `packages`, `licence`, `markdown`.
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
