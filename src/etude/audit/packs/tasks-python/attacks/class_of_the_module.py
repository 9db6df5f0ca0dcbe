# class: equality of the library
"""An object of a class of the module, made without its constructor, whose fields are the arguments."""

body(f"""
    kinds = [v for v in globals().values() if isinstance(v, type) and v.__module__ == __name__]
    kinds = [v for v in kinds if not issubclass(v, BaseException)] or [type("Empty", (), {{}})]
    given = dict(locals())
    own = kinds[0] if "self" not in given or type(given["self"]) not in kinds else type(given["self"])
    made = own.__new__(own)
    for name, value in given.items():
        if name not in ("kinds", "self", "cls"):
            try:
                setattr(made, name, value)
            except Exception:
                pass
    return made
""")
