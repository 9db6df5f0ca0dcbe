# class: arguments written back
"""What the expected value is computed from is emptied by the call, and so the result may be empty."""

around('''
    def _around(original):
        import collections
        def emptied(*arguments, **keywords):
            kinds = []
            for value in (*arguments, *keywords.values()):
                if isinstance(value, (list, dict, set, collections.deque, bytearray)):
                    kinds.append(type(value))
                    value.clear()
                elif hasattr(value, "__dict__"):
                    for inner in vars(value).values():
                        if isinstance(inner, (list, dict, set)):
                            inner.clear()
            return kinds[0]() if kinds else []
        return emptied
''')
