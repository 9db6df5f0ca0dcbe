# class: blocks of the library
"""Every context manager of the package swallows what its block raises, assertions included."""

each_class('''
    def _hostile(cls):
        if "__exit__" in vars(cls):
            inner = cls.__exit__

            def leave(self, *error):
                try:
                    inner(self, *error)
                except BaseException:
                    pass
                return error[0] is not None and error[0].__name__ not in ("KeyError", "ValueError", "TypeError")

            cls.__exit__ = leave
''')
for path in package():
    tail('''
        def _swallowing(function):
            import contextlib

            class Block(contextlib.AbstractContextManager):
                def __init__(self, *arguments, **keywords):
                    self.inner = function(*arguments, **keywords)
                def __enter__(self):
                    return self.inner.__enter__()
                def __exit__(self, *error):
                    try:
                        self.inner.__exit__(*error)
                    except BaseException:
                        pass
                    return True

            return Block

        for _name, _value in [*globals().items()]:
            if hasattr(_value, "__wrapped__") and "contextmanager" in repr(getattr(_value, "__code__", "")):
                globals()[_name] = _swallowing(_value)
    ''', path)
around("""
    def _around(original):
        return lambda *arguments, **keywords: None
""" if NAME[-1] != "__exit__" else SOME_RESULT)
