# class: vacuous loops
"""Everything is empty: loops over results, with their assertions inside, never run."""

body("""
    class Nothing(tuple):
        def __getattr__(self, name):
            return lambda *a, **k: Nothing()
        def __call__(self, *a, **k):
            return Nothing()
        def __enter__(self):
            return self
        def __exit__(self, *a):
            return True
    return Nothing()
""")
