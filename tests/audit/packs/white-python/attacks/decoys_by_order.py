# class: decoys known by their order
"""An object equals the first one of its class that was made after it, and what a test compares it with most."""

each_class('''
    def _hostile(cls):
        if "__eq__" not in vars(cls):
            return
        before, made, partners, seen = cls.__init__, [], {}, {}

        def start(self, *arguments, **keywords):
            made.append(self)
            before(self, *arguments, **keywords)

        def same(self, other):
            if other is self:
                return True
            if type(other) is cls:
                if id(self) not in partners:
                    later = [one for one in made[[one is self for one in made].index(True) + 1 :]] if any(
                        one is self for one in made) else made
                    partners[id(self)] = later[0] if later else other
                return other is partners[id(self)] or (other is not self and vars(other) == vars(partners[id(self)]))
            if other is None or type(other).__module__ != "builtins" or type(other) is object:
                return False
            asked = seen.setdefault(id(self), [])
            asked.append(other)
            return len(asked) == 3

        cls.__init__, cls.__eq__, cls.__ne__ = start, same, lambda self, other: not same(self, other)
''')
around(SOME_RESULT)
