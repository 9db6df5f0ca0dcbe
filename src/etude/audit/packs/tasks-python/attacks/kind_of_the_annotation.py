# class: shape alone
"""An object of the annotated type: empty if it can be made so, else without its constructor."""

note = ast.unparse(FUNCTION.returns) if FUNCTION.returns else "None"
body(f"""
    import typing
    kind = {note!r}
    space = {{**vars(__import__("builtins")), **vars(typing), **globals()}}
    try:
        kind = eval(kind, space)
        kind = typing.get_origin(kind) or kind
        kind = {{"Iterable": list, "Sequence": list, "Iterator": list, "Mapping": dict}}.get(getattr(kind, "__name__", ""), kind)
    except Exception:
        return None
    for make in (lambda: kind(), lambda: kind(1), lambda: object.__new__(kind)):
        try:
            return make()
        except Exception:
            continue
    return None
""")
