# class: failures like infrastructure's
"""Results without end: iterators, lengths, texts and indices that feed the verifier until it dies of them."""

tail("""
    class _Endless:
        def __iter__(self):
            return self
        def __next__(self):
            return "x" * 10**6
        def __len__(self):
            return 2**62
        def __getitem__(self, key):
            return list(range(10**5))
        def __length_hint__(self):
            return 2**62
        def __index__(self):
            return 2**62
        def keys(self):
            return self
""")
body("return _Endless()")
