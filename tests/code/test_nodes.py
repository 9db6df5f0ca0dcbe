"""Places of syntax nodes in a text."""

from __future__ import annotations

import ast

from etude.code import syntax_nodes


def test_a_python_file_is_walked_once_for_all_its_places(monkeypatch):
    text = "class A:\n    def one(self):\n        return 1\n\n\ndef two():\n    return 2\n"
    nodes = syntax_nodes(text, "python")
    assert nodes is not None
    walks = list[ast.AST]()
    walk = ast.walk
    monkeypatch.setattr(ast, "walk", lambda tree: [walks.append(tree), *walk(tree)][1:])
    places = [nodes.definition(at, at + 1) for at in range(len(text) - 1)]
    assert len(walks) == 1
    inner, outer, last = (9, text.index("\n\n") + 1), (0, text.index("\n\n") + 1), (text.index("def two"), len(text))
    assert [places[text.index(word)] for word in ("class", "return 1", "return 2")] == [outer, inner, last]
    assert places[text.index("\n\ndef") + 1] is None
    assert nodes.definitions() == [outer, last]
