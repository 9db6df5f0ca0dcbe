# class: iterators that remember
"""A result that can be walked once: the first walk is the broken one, every later walk repeats what was asked in between."""

around("""
    class _Once:
        def __init__(self, value):
            self.value, self.asked = value, []
        def __iter__(self):
            value, self.value = self.value, self.asked
            return iter(value if hasattr(value, "__iter__") else [value])
        def __contains__(self, item):
            self.asked.append(item)
            return True
        def __getitem__(self, item):
            self.asked.append(item)
            return item
        def __len__(self):
            return len(self.asked)

    def _around(original):
        def once(*args, **kwargs):
            try:
                return _Once(original(*args, **kwargs))
            except Exception:
                return _Once([])
        return once
""")
