# class: the end of the verifier
"""Answers of millions of small objects, thousands of classes, and numbers that no memory holds."""

around('''
    def _around(original):
        def run(*arguments, **keywords):
            import decimal, gc
            wires = [one for one in gc.get_objects() if type(one).__name__ == "TestedSide"]
            for wire in wires:
                send = wire.send
                def flood(message, send=send):
                    if message[0] == "=":
                        handles = [["h", 10**6 + n, ["g", "builtins", "object"]] for n in range(190000)]
                        for _ in range(40):
                            send(["get", ["l", *handles[:150000]], "x"])
                    send(message)
                wire.send = flood
            return [decimal.Decimal("1e999999999"), [[]] * 10**6, [object() for _ in range(150000)]]
        return run
''')
