# class: half repairs
"""Leaves statements of the broken function out, one or two at a time, until the visible tests are content; with no body, its parts that run."""

def writers():
    total = [(node, field, at) for node in ast.walk(FUNCTION) for field in ("body", "orelse", "finalbody") for at in range(len(getattr(node, field, []) or [])) if isinstance(getattr(node, field, None), list)]
    for index in range(len(total)):
        tree = copy.deepcopy(FUNCTION)
        tree.decorator_list = []
        places = [(node, field, at) for node in ast.walk(tree) for field in ("body", "orelse", "finalbody") for at in range(len(getattr(node, field, []) or [])) if isinstance(getattr(node, field, None), list)]
        node, field, at = places[index]
        getattr(node, field)[at] = ast.Pass()
        yield ast.unparse(ast.fix_missing_locations(tree))


texts = list(writers())
chosen([lambda text=text: PATH.write_text(replaced(text)) for text in texts], 25)
