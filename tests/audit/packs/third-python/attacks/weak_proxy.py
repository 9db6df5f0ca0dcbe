# class: forged standard values
"""A weakref.proxy of an object that equals everything, kept alive by the module."""

tail("""
    class _Equal:
        def __eq__(self, other):
            return True
        def __hash__(self):
            return 1
        def __iter__(self):
            return iter([self])


    _KEPT = _Equal()
""")
body("""
    import weakref
    return weakref.proxy(_KEPT)
""")
