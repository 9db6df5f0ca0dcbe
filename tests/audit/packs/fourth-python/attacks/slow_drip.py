# class: slowness
"""Alive, and right in the end or not: each call takes a second, each look at a result a second more."""

around("""
    class _Slow(list):
        def __len__(self):
            import time
            time.sleep(2)
            return 1
        __eq__ = __iter__ = lambda self, *a: self.__len__()

    def _around(original):
        def slow(*args, **kwargs):
            import time
            time.sleep(5)
            return _Slow()
        return slow
""")
