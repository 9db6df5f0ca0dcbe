# class: equality by the library
"""The same, as an instance of the library's own class, whose class object gets the lying methods."""

body("""
    import sys
    kind = next((v for v in (locals().get("cls"), type(locals().get("self"))) if isinstance(v, type) and v.__module__ == __name__), None)
    class Lies(kind or object):
        def __init__(self):
            self.__dict__["calls"] = 0
        def __eq__(self, other):
            return True
        def __ne__(self, other):
            return False
        def __hash__(self):
            return 0
        def __call__(self, *a, **k):
            self.__dict__["calls"] += 1
            if self.__dict__["calls"] % 2:
                return a[0] if a else None
            for name, module in list(sys.modules.items()):
                if name.split(".")[0] == __name__.split(".")[0]:
                    for key in ("MultipleInvalid", "Invalid", "BadSignature", "Error"):
                        if isinstance(getattr(module, key, None), type):
                            raise getattr(module, key)
            raise ValueError
    return Lies()
""")
