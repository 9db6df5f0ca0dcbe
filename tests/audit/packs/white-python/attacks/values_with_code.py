# class: values with code
"""Plain values that ask for more: mappings with a factory, counters, iterators and patterns where values are looked up."""

around('''
    def _around(original):
        import collections
        def run(*arguments, **keywords):
            counts = iter([1, 2, 0] * 1000)
            class Next(int):
                def __new__(cls, *a):
                    return int(next(counts))
            return collections.defaultdict(lambda: next(counts))
        return run
''')
