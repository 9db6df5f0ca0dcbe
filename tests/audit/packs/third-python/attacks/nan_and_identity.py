# class: results that change
"""Interned and identical objects instead of equal ones: the arguments themselves, NaN, singletons, shared constants."""

around("""
    def _around(original):
        def inner(*a, **k):
            try:
                value = original(*a, **k)
            except NotImplementedError:
                value = float("nan")
            for thing in (*a, *k.values()):
                try:
                    if thing == value:
                        return thing
                except Exception:
                    pass
            return value if value == value else NotImplemented
        return inner
""")
