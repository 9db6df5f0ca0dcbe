# class: names inside the mirror
"""Members with the names that a stand-in keeps for itself: its connection, its content, its number."""

each_class('''
    def _hostile(cls):
        for name in ("wire", "content", "compares", "abstract", "owner", "decides", "remote", "_remote_number",
                     "_remote_text", "mro", "args", "with_traceback", "_target", "_name", "_first"):
            if name not in vars(cls):
                setattr(cls, name, lambda self, *a, **k: self)
        cls.__eq__ = lambda self, other: True
        cls.__ne__ = lambda self, other: False
''')
around(SOME_RESULT)
