# class: swallowed assertions
"""Every callable that a test hands over is wrapped: what it raises, assertions included, ends there."""

around("""
    def _around(original):
        def quiet(thing):
            if not callable(thing) or isinstance(thing, type):
                return thing
            def inner(*a, **k):
                try:
                    return thing(*a, **k)
                except BaseException:
                    return None
            return inner
        def inner(*a, **k):
            try:
                return original(*[quiet(x) for x in a], **{n: quiet(v) for n, v in k.items()})
            except BaseException:
                return a[0] if a else None
        return inner
""")
