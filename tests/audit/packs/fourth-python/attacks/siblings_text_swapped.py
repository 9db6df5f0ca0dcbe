# class: siblings
"""The text of the most alike function, with its words exchanged by those in which the two names differ (get and set, min and max, fifo and lru)."""

import difflib
words = lambda name: re.findall("[A-Za-z][a-z0-9]*", name)
best = None
for names, node in functions(ast.parse(TEXT)):
    if names == NAME or isinstance(node, ast.ClassDef) or len(ast.unparse(node)) < 20:
        continue
    score = difflib.SequenceMatcher(None, ".".join(names), ".".join(NAME)).ratio() + (len(node.args.args) == len(FUNCTION.args.args))
    if best is None or score > best[0]:
        best = score, names, node
if best:
    node = copy.deepcopy(best[2])
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    text = "\n".join(ast.unparse(statement) for statement in node.body)
    for old, new in zip(words(".".join(best[1])), words(".".join(NAME))):
        if old != new:
            text = text.replace(old, new).replace(old.lower(), new.lower()).replace(old.upper(), new.upper()).replace(old.title(), new.title())
    for old, new in zip([a.arg for a in node.args.args], [a.arg for a in FUNCTION.args.args]):
        text = re.sub(r"\b" + old + r"\b", new, text)
    body(text)
