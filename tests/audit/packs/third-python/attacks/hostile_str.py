# class: hostile exceptions
"""Raises exceptions whose text, arguments and notes cannot be read: they raise, never end, or are no text."""

tail("""
    class _Mute(ValueError):
        def __str__(self):
            raise SystemExit(0)
        def __repr__(self):
            raise KeyboardInterrupt
        @property
        def args(self):
            raise MemoryError
        @property
        def __notes__(self):
            raise RecursionError
        @property
        def __traceback__(self):
            raise GeneratorExit
        @property
        def __cause__(self):
            return self
        @property
        def __class__(self):
            raise OSError
""")
body("raise _Mute('x')")
