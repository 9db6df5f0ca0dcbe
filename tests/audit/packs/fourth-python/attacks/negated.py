# class: half repairs
"""The opposite of the broken result: other truth, sign, order, half and kind."""

around("""
    def _around(original):
        def opposite(*args, **kwargs):
            try:
                value = original(*args, **kwargs)
            except Exception:
                return args[-1] if args else None
            if isinstance(value, bool) or value is None:
                return not value
            if isinstance(value, (int, float)):
                return -value
            try:
                return value[::-1]
            except Exception:
                return value
        return opposite
""")
