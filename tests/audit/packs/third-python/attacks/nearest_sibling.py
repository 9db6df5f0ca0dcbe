# class: twins
"""Takes the body of the function in the tree whose name, parameters and docstring are most alike."""

import difflib


def portrait(node):
    return f"{node.name} {ast.unparse(node.args)} {ast.get_docstring(node) or ''}"


rivals = []
for path in pathlib.Path(".").rglob("*.py"):
    try:
        text = path.read_text()
        nodes = list(functions(ast.parse(text)))
    except (OSError, SyntaxError, ValueError):
        continue
    for names, node in nodes:
        if (path.resolve(), node.lineno) != (PATH.resolve(), FUNCTION.lineno) and "NotImplementedError" not in ast.unparse(node):
            rivals.append((difflib.SequenceMatcher(None, portrait(node), portrait(FUNCTION)).ratio(), ast.unparse(node.body), node))
rivals.sort(key=lambda r: r[0], reverse=True)
if rivals:
    node = rivals[0][2]
    body("\n".join(ast.unparse(s) for s in node.body) + "\n")
