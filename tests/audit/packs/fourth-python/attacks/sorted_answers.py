# class: order and repetition
"""The broken result in canonical order without repetitions, as tests that sort or count would take it."""

around("""
    def _around(original):
        def canonical(*args, **kwargs):
            try:
                value = original(*args, **kwargs)
            except Exception:
                value = args[1] if len(args) > 1 else args[0] if args else []
            try:
                return type(value)(sorted(set(value))) if not isinstance(value, (str, bytes, dict)) else value
            except Exception:
                return value
        return canonical
""")
