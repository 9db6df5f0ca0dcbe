# class: arguments written back
"""Changes the arguments until they equal the broken result: a test that compares with its input then agrees."""

around("""
    def _around(original):
        def inner(*a, **k):
            try:
                value = original(*a, **k)
            except NotImplementedError:
                value = []
            if hasattr(value, "__next__"):
                value = list(value)
            for thing in (*a, *k.values()):
                if isinstance(thing, list) and isinstance(value, (list, tuple)):
                    thing[:] = value
                elif isinstance(thing, dict) and isinstance(value, dict):
                    thing.clear()
                    thing.update(value)
                elif isinstance(thing, set):
                    thing.clear()
            return value
        return inner
""")
