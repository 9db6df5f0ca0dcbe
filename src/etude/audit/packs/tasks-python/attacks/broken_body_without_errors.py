# class: swallowed errors
"""The broken function, whose errors become the nearest plain value."""

around("""
    def _around(original):
        def calm(*args, **kwargs):
            try:
                return original(*args, **kwargs)
            except Exception:
                return args[-1] if args else None
        return calm
""")
