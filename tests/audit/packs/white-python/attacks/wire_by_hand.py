# class: messages by hand
"""Replies are written by hand: objects of the other side by number, shared modules, classes, warnings, changes."""

tail('''
    def _replies(wire):
        import itertools
        forms = itertools.cycle([
            ["o", 0], ["o", 1], ["o", 2], ["p", 0], ["m", "unittest.mock"], ["g", "unittest.mock", "ANY"],
            ["k", ["g", "builtins", "object"]], ["k", ["g", "builtins", "type"]], ["a", 0], ["r", 0], ["r", 1],
            ["dd", ["k", ["g", "builtins", "int"]]], ["re", ".*", 0], ["D", "property", None, None, None],
            ["E", 0, ["g", "builtins", "AssertionError"], ["t"], ""], ["h", 0, ["g", "builtins", "object"]],
        ])
        send = type(wire).send

        def forged(message):
            if message[0] == "=" and len(message) == 4:
                message = ["=", next(forms), [], [["AssertionError", "x"]] if next(forms)[0] == "o" else []]
            send(wire, message)

        wire.send = forged

    def _find():
        import gc
        for one in gc.get_objects():
            if type(one).__name__ == "TestedSide":
                return one

    _wire = _find()
''')
around('''
    def _around(original):
        def run(*arguments, **keywords):
            wire = _wire or _find()
            if wire is not None and "send" not in vars(wire):
                _replies(wire)
            return 0
        return run
''')
