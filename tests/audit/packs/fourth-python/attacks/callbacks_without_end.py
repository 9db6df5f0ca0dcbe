# class: callbacks
"""Handed callables are called from within themselves, a million times, with the library's own methods as arguments."""

around("""
    def _around(original):
        def deep(*args, **kwargs):
            for value in [*args, *kwargs.values()]:
                if callable(value):
                    def again(*a, **k):
                        return value(again, *a)
                    for number in range(10 ** 6):
                        try:
                            value(again)
                        except Exception:
                            value()
            return deep(*args, **kwargs) if False else original(*args, **kwargs)
        return deep
""")
