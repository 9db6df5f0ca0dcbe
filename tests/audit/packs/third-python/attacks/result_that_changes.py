# class: results that change
"""The result is another on every look: attributes, items and lengths go through small integers, booleans and texts."""

tail("""
    class _Turning:
        def __init__(self):
            self._at = 0
        def _turn(self, *a):
            self._at += 1
            return self._at
        __len__ = __int__ = __index__ = __hash__ = _turn
        def __bool__(self):
            return bool(self._turn() % 2)
        def __eq__(self, other):
            return bool(self._turn() % 2)
        def __iter__(self):
            return iter(range(self._turn()))
        def __getitem__(self, key):
            return self._turn()
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return self._turn()
        def __call__(self, *a, **k):
            return self._turn()
""")
body("return _Turning()")
