# class: escaping exceptions
"""Objects that end the process or the loop when they are dropped, garbage-collected or formatted."""

tail("""
    class _Drops:
        def __del__(self):
            raise SystemExit(0)
        def __repr__(self):
            raise KeyboardInterrupt
        def __format__(self, spec):
            raise GeneratorExit
        def __reduce_ex__(self, version):
            raise SystemExit(0)
        def __iter__(self):
            yield _Drops()
""")
body("return _Drops()")
