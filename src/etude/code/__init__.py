"""Tools for source text: languages and their syntax, functions, mutation, packages, licences, Markdown tables.

Everything that makes tasks or training text is built on these modules. They import nothing of etude but `errors`, and
run nothing of the repositories that they read. Public: `functions` (the layout of a Python repository and its
functions), `mutate` (the one mutation engine), `languages`, `packages`, `licence`, `markdown`.
"""
