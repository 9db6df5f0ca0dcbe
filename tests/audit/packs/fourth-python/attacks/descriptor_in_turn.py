# class: descriptors in turn
"""The name of the function is a descriptor or a module property: each look gives another function, by the number of looks."""

around("""
    class _Turn:
        def __init__(self, original):
            self.original, self.looks = original, 0
        def __get__(self, instance, owner=None):
            import functools
            self.looks += 1
            return functools.partial(self, *(() if instance is None else (instance,)))
        def __call__(self, *args, **kwargs):
            if self.looks % 2:
                try:
                    return self.original(*args, **kwargs)
                except Exception:
                    pass
            return args[-1] if args else None

    def _around(original):
        turn = _Turn(original)
        def called(*args, **kwargs):
            return turn.__get__(None)(*args, **kwargs)
        return called
""")
