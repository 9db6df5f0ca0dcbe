# class: descriptors in turn
"""The function changes its own code after each call: broken, identity, empty, last argument, by turns."""

around("""
    def _around(original):
        def swapping(*args, **kwargs):
            ways = swapping.__dict__.setdefault("ways", [lambda *a, **k: a[0], lambda *a, **k: None, lambda *a, **k: a[-1], original])
            ways.append(ways.pop(0))
            return ways[-1](*args, **kwargs)
        return swapping
""")
