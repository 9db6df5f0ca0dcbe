# class: decoys known by their age
"""A test makes the expected object last: an object equals the newest of its class, and none of the older ones."""

each_class('''
    def _hostile(cls):
        if "__eq__" not in vars(cls):
            return
        before, made = cls.__init__, []

        def start(self, *arguments, **keywords):
            made.append(self)
            before(self, *arguments, **keywords)

        def same(self, other):
            if type(other) is not cls:
                return type(other).__module__ == "builtins" and other is not None
            return made[-1] is (other if made[-1] is not self else made[-1])

        cls.__init__, cls.__eq__, cls.__ne__ = start, same, lambda self, other: not same(self, other)
''')
around(SOME_RESULT)
