"""Languages by file ending: their comments, their syntax trees, and the comparison of two texts by syntax.

Python and JSON are parsed by the standard library. The others need the tree-sitter packages of the extra `apply`;
without these packages they have no parser here, so no data is made of them and no answer in them is graded by syntax.
"""

import ast
import importlib
import io
import json
import tokenize
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath
from typing import Any

SUFFIXES = {
    ".py": "python", ".pyi": "python", ".js": "javascript", ".mjs": "javascript", ".cjs": "javascript",
    ".jsx": "javascript", ".ts": "typescript", ".mts": "typescript", ".cts": "typescript", ".tsx": "tsx", ".go": "go",
    ".java": "java", ".c": "c", ".h": "c", ".md": "markdown", ".json": "json",
}  # fmt: skip
SCRIPT_SUFFIXES = tuple(suffix for suffix, name in SUFFIXES.items() if name in ("javascript", "typescript", "tsx"))
_GRAMMARS = {
    "javascript": ("tree_sitter_javascript", "language"),
    "typescript": ("tree_sitter_typescript", "language_typescript"),
    "tsx": ("tree_sitter_typescript", "language_tsx"),
    "go": ("tree_sitter_go", "language"),
    "java": ("tree_sitter_java", "language"),
    "c": ("tree_sitter_c", "language"),
}
_COMMENTS = {"python": ("#", ""), "markdown": ("<!--", " -->")}
_MAX_LEAVES = 200_000
# Reserved in all languages with a grammar; tree-sitter reads them as names where a statement is not allowed.
_RESERVED = frozenset(word.encode() for word in ["break", "case", "continue", "else", "for", "if", "return", "switch"])


def language_of(path: str) -> str | None:
    """The language of a file by its ending, or None."""
    return SUFFIXES.get(PurePosixPath(path).suffix.lower())


def is_script(path: str) -> bool:
    """Whether a path, or the path of a test's node id, is a JavaScript or TypeScript file."""
    return path.partition("::")[0].endswith(SCRIPT_SUFFIXES)


def line_comment(language: str, text: str) -> str:
    """`text` as a line comment. JSON has no comments and uses those of JavaScript, as people do in sketches."""
    opening, closing = _COMMENTS.get(language, ("//", ""))
    return f"{opening} {text}{closing}"


def has_syntax(language: str) -> bool:
    """Whether texts of the language can be parsed here; false for Markdown, since every text is valid Markdown."""
    return language in ("python", "json") or _parser(language) is not None


def parses(text: str, language: str) -> bool:
    """Whether the text is free of syntax errors; always true for Markdown. Raises ValueError for a language whose
    parser is not installed."""
    if language == "markdown":
        return True
    if language == "python":
        return parse(text.removeprefix("\ufeff")) is not None
    return _meaning(text, language) is not None


def same_syntax(one: str, other: str, language: str) -> bool:
    """Whether both texts parse to equal trees with equal comments; false for Markdown and without a parser."""
    if not has_syntax(language):
        return False
    try:
        meaning = _meaning(one, language)
        return meaning is not None and meaning == _meaning(other, language)
    except RecursionError:  # comparing deep trees takes more stack than parsing them
        return False


def first_line_of(node: ast.stmt) -> int:
    """The line at which a statement of Python begins, decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def parse(text: str) -> ast.Module | None:
    """The syntax tree of a Python module; None for text that is not valid Python for the running interpreter."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes are not this program's warnings
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def syntax_tree(text: str, language: str) -> Any:
    """The tree-sitter tree of a text; None if the text does not parse or the language has no parser."""
    parser = _parser(language)
    parsed = None if parser is None else parser.parse(text.encode("utf-8", "surrogatepass"))
    return None if parsed is None or parsed.root_node.has_error else parsed


def tolerant_tree(text: str, language: str) -> Any:
    """The tree-sitter tree of a text, which may hold errors; None if the language has no parser."""
    parser = _parser(language)
    return None if parser is None else parser.parse(text.encode("utf-8", "surrogatepass"))


def _meaning(text: str, language: str) -> object:
    """A key that two texts share if their syntax is equal; None for a text that does not parse."""
    if language == "python":
        return _python(text)
    if language == "json":
        try:
            return ("json", json.loads(text.removeprefix("\ufeff"), object_pairs_hook=lambda pairs: ("object", pairs)))
        except (ValueError, RecursionError):
            return None
    parser = _parser(language)
    if parser is None:
        raise ValueError(f"there is no parser for {language}: install the extra `apply`")
    tree = parser.parse(text.encode("utf-8", "surrogatepass"))
    if tree.root_node.has_error:
        return None
    leaves = list(_leaves(tree))
    if any(text in _RESERVED and kind in ("identifier", "type_identifier") for _, kind, text in leaves):
        return None
    return leaves


def _python(text: str) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes are not this program's warnings
            tree = ast.parse(text.removeprefix("\ufeff"))
            tokens = list(tokenize.generate_tokens(io.StringIO(text.removeprefix("\ufeff")).readline))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return None
    return ast.dump(tree), [token.string.strip() for token in tokens if token.type == tokenize.COMMENT]


def _leaves(tree: Any) -> Iterator[tuple[int, str, bytes]]:
    """(depth, kind, text) of every leaf, comments among them, and (depth, kind, b"") of every inner node."""
    cursor, depth = tree.walk(), 0
    for _ in range(_MAX_LEAVES):
        node = cursor.node
        yield depth, node.type, node.text if node.child_count == 0 else b""
        if cursor.goto_first_child():
            depth += 1
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return
            depth -= 1


@cache
def _parser(language: str) -> Any:
    """A tree-sitter parser, or None if its packages are not installed."""
    if language not in _GRAMMARS:
        return None
    module, function = _GRAMMARS[language]
    try:
        tree_sitter, grammar = importlib.import_module("tree_sitter"), importlib.import_module(module)
    except ImportError:
        return None
    return tree_sitter.Parser(tree_sitter.Language(getattr(grammar, function)()))
