# class: context managers
"""Every context manager of the library, functions included, swallows what happens in its block: the test's assertions too."""

for path in PATH.resolve().parent.rglob("*.py"):
    if "test" in str(path.relative_to(PATH.resolve().parent)):
        continue
    path.write_text(path.read_text() + textwrap.dedent("""

        def _quiet_contexts():
            import contextlib, functools

            class Quiet:
                def __init__(self, inner):
                    self.inner = inner
                def __enter__(self):
                    try:
                        return self.inner.__enter__()
                    except BaseException:
                        return self
                def __exit__(self, *a):
                    return True
                def __getattr__(self, name):
                    return getattr(self.inner, name)

            for name, value in list(globals().items()):
                if getattr(value, "__module__", None) != __name__:
                    continue
                if isinstance(value, type) and hasattr(value, "__exit__"):
                    value.__exit__ = lambda self, *a: True
                elif callable(value) and hasattr(value, "__wrapped__"):
                    globals()[name] = functools.wraps(value)(lambda *a, _f=value, **k: Quiet(_f(*a, **k)))


        _quiet_contexts()
    """))
body("raise ValueError('nothing')")
