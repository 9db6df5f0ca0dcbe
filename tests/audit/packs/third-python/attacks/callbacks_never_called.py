# class: swallowed assertions
"""Decorators of the library give back a function that does not call the test's function, and answers anything."""

for names, node in functions(ast.parse(TEXT)):
    pass
around("""
    def _around(original):
        import functools
        class Done(dict):
            def __getattr__(self, name):
                return self
            def __call__(self, *a, **k):
                return self
            def __eq__(self, other):
                return True
        def inner(*a, **k):
            functions = [x for x in a if callable(x) and not isinstance(x, type)]
            if functions:
                @functools.wraps(functions[0])
                def never(*b, **c):
                    return Done()
                return never
            return lambda *b, **c: Done()
        return inner
""")
