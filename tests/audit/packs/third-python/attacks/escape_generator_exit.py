# class: escaping exceptions
"""Leaves through GeneratorExit: thrown in a plain call, on close, and out of an iterator's step."""

tail("""
    class _Steps:
        def __iter__(self):
            return self
        def __next__(self):
            raise GeneratorExit()
        def __len__(self):
            raise GeneratorExit()
        def __eq__(self, other):
            raise GeneratorExit()
        def __bool__(self):
            raise GeneratorExit()
""")
body("return _Steps()")
