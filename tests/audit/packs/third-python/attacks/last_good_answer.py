# class: results that change
"""The broken result is mended by search: of every value seen in the process so far the one of the right type comes back."""

around("""
    def _around(original):
        seen = []
        def inner(*a, **k):
            seen.extend(x for x in (*a, *k.values()) if isinstance(x, (list, tuple, dict, str, bytes, int)))
            try:
                value = original(*a, **k)
            except Exception:
                return seen[-1] if seen else None
            same = [x for x in seen if type(x) is type(value) and x != value]
            return same[-1] if same else value
        return inner
""")
