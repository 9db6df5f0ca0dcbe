# class: callbacks
"""Callbacks get objects whose every use raises SystemExit, GeneratorExit or a group of them, in the test's own code."""

around("""
    class _Leaves:
        def _leave(self, *args):
            raise BaseExceptionGroup("leave", [SystemExit(0), KeyboardInterrupt()])
        __eq__ = __call__ = __iter__ = __len__ = __str__ = __repr__ = __bool__ = __add__ = __getitem__ = __format__ = __index__ = __fspath__ = __enter__ = __lt__ = _leave
        def __hash__(self):
            return 0
        def __getattr__(self, name):
            raise SystemExit(0)

    def _around(original):
        def leaving(*args, **kwargs):
            for value in [*args, *kwargs.values()]:
                if callable(value):
                    value(_Leaves())
            return _Leaves()
        return leaving
""")
