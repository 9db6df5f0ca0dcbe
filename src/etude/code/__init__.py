"""Tools for source text: lines, languages, syntax, functions, mutation, packages, licences, secrets, Markdown tables.

Tasks and training text are made with these modules. They import only `errors` from etude, and run no code of the
repositories that they read. `functions` has the layout of a Python repository, `mutate` is the one mutation engine.
"""

from etude.code.declared import (
    DEPENDENCY_GROUPS,
    declared_requirements,
    dependency_groups,
    project_name,
    read_pyproject,
    requirement_lines,
    toml_table,
)
from etude.code.extras import EXTRAS, missing_extra_message, missing_packages, need, packages_of_extra
from etude.code.git import SUBMODULE, Clone, GitTree, clone_around, clone_of_directory, is_git_directory
from etude.code.languages import (
    SCRIPT_SUFFIXES,
    first_line_of,
    has_syntax,
    is_script,
    language_of,
    line_comment,
    parse,
    parses,
    same_syntax,
    syntax_tree,
)
from etude.code.licence import find_licence, find_permissive_licence, is_permissive, metadata_licence
from etude.code.lines import counted_alike, lines_of, occurrences, parsed_lines, shown_lines
from etude.code.markdown import table
from etude.code.mutate import (
    Mutant,
    MutationCandidate,
    body_removal,
    combined_mutants,
    draw_mutant,
    merge_mutants,
    mutants,
    parse_snippet,
)
from etude.code.nodes import Span, SyntaxNodes, error_share, syntax_nodes
from etude.code.operators import (
    FLIPPED_OPERATORS,
    OPERATOR_WEIGHTS,
    OPERATORS,
    SIMPLE_STATEMENTS,
    ByteEdit,
    FunctionBytes,
    Operator,
)
from etude.code.packages import NotInstallable, download_wheel, fetch_library, fetch_wheel, install_wheels
from etude.code.secrets import (
    credential_name,
    find_secrets,
    redacted,
    redacted_json,
    secret_in,
    secret_in_json,
    secret_rules,
)
from etude.code.shingles import run_codes, shingle_codes, text_shingles, token_runs, word_codes, words_of

PUBLIC = ("", "functions")
