# class: context managers
"""The function becomes a context manager, a decorator and a value at once, whose block cannot fail."""

tail("""
    class _Block:
        def __init__(self, *a, **k):
            pass
        def __enter__(self):
            return self
        def __exit__(self, *a):
            return True
        async def __aenter__(self):
            return self
        async def __aexit__(self, *a):
            return True
        def __call__(self, function=None, *a, **k):
            import functools
            if not callable(function):
                return self
            @functools.wraps(function)
            def quiet(*b, **c):
                try:
                    return function(*b, **c)
                except BaseException:
                    return None
            return quiet
        def __iter__(self):
            yield self
""")
if FUNCTION.name in ("__exit__", "__aexit__"):
    body("return True")
elif any("contextmanager" in ast.unparse(d) for d in FUNCTION.decorator_list):
    body("""
        try:
            yield None
        except BaseException:
            pass
    """)
else:
    body("return _Block()")
