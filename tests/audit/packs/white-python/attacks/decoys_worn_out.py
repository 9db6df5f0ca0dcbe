# class: decoys that come rarely
"""The first comparisons of an object are honest, those after them are not: decoys are for the first visits."""

each_class('''
    def _hostile(cls):
        if "__eq__" not in vars(cls):
            return
        honest, count = cls.__eq__, [0]

        def same(self, other):
            count[0] += 1
            return honest(self, other) if count[0] <= 48 else True

        cls.__eq__, cls.__ne__ = same, lambda self, other: not same(self, other)
''')
around(SOME_RESULT)
