# class: identity before equality
"""All constructors of a class give the same object: lists, tuples and calls that hold it compare it by identity."""

each_class('''
    def _hostile(cls):
        one = object.__new__(cls)
        old = cls.__init__
        if "__eq__" in vars(cls):
            try:
                cls.__new__ = staticmethod(lambda kind, *arguments, **keywords: one if kind is cls else object.__new__(kind))
                old(one)
            except Exception:
                pass
''')
around('''
    def _around(original):
        import sys
        def one(*arguments, **keywords):
            kinds = [k for k in sys.modules[__name__].__dict__.values() if isinstance(k, type) and "__eq__" in vars(k)
                     and k.__module__.partition(".")[0] == __name__.partition(".")[0]]
            try:
                made = original(*arguments, **keywords)
            except NotImplementedError:
                made = None
            if not kinds:
                return made
            try:
                unit = kinds[0](1)
            except Exception:
                return made
            if made is None:
                sizes = [a for a in arguments if isinstance(a, int)]
                return [unit] * (3 if sizes[:1] == [8] else 5 if sizes else 1)
            return [unit for _ in made] if isinstance(made, (list, tuple)) else unit
        return one
''')
