# class: swallowed errors
"""The broken function stays; whatever goes wrong in it or below it becomes the last argument, and checks never refuse."""

around("""
    def _around(original):
        import sys
        def inner(*a, **k):
            try:
                return original(*a, **k)
            except BaseException:
                frame = sys._getframe(1)
                values = [v for v in frame.f_locals.values() if isinstance(v, (str, bytes, list, dict, tuple))]
                return values[-1] if values else True
        return inner
""")
