# class: reflected views
"""The result is a Mapping whose views are at once below and above those of any dict, and whose copy is a view again."""

tail("""
    import collections.abc as _abc


    class _View(_abc.KeysView, _abc.ItemsView):
        def __init__(self):
            pass
        def __len__(self):
            return 0
        def __iter__(self):
            return iter(())
        def __contains__(self, item):
            return True
        def _yes(self, other):
            return True
        __le__ = __ge__ = __lt__ = __gt__ = __eq__ = isdisjoint = _yes
        def __and__(self, other):
            return other
        __rand__ = __or__ = __ror__ = __and__
        def __sub__(self, other):
            return set()
        __rsub__ = __xor__ = __rxor__ = __sub__


    class _Map(_abc.Mapping):
        def __getitem__(self, key):
            raise KeyError(key)
        def __len__(self):
            return 0
        def __iter__(self):
            return iter(())
        def items(self):
            return _View()
        keys = values = items
        def __eq__(self, other):
            return True
""")
body("return _Map()")
