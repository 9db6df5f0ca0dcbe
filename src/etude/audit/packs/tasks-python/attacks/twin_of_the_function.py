# class: copies
"""The body of the function in the tree whose name, parameters and docstring are most alike."""

import difflib


def portrait(node):
    return f"{node.name} {ast.unparse(node.args)} {ast.get_docstring(node) or ''}"


rivals = []
for path in pathlib.Path().rglob("*.py"):
    try:
        nodes = list(functions(ast.parse(path.read_text())))
    except (OSError, SyntaxError, ValueError):
        continue
    for _, node in nodes:
        if (path.resolve(), node.lineno) != (PATH.resolve(), FUNCTION.lineno):
            rivals.append((difflib.SequenceMatcher(None, portrait(node), portrait(FUNCTION)).ratio(), ast.unparse(node.body)))
if rivals:
    body(max(rivals)[1] + "\n")
