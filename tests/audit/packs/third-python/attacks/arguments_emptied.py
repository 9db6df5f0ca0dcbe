# class: arguments written back
"""Empties every list, dict, set and buffer that it was given, and returns an empty one of the same kind."""

around("""
    def _around(original):
        def inner(*a, **k):
            kind = list
            for thing in (*a, *k.values()):
                if isinstance(thing, (list, dict, set, bytearray)):
                    kind = type(thing)
                    thing.clear()
                elif hasattr(thing, "__next__"):
                    for _ in range(100000):
                        if next(thing, inner) is inner:
                            break
            return kind()
        return inner
""")
