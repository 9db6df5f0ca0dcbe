# class: examples of the documents
"""Type stubs, annotations and the docstring's last sentence say what kind is returned: an argument or field of that kind is."""

kind = ast.unparse(FUNCTION.returns) if FUNCTION.returns else (re.findall(r"(?:[Rr]eturns?|:rtype:)\W+(?:an? |the )?(\w+)", ast.get_docstring(FUNCTION) or "") or ["object"])[-1]
around(f"""
    def _around(original, kind={kind!r}):
        def typed(*args, **kwargs):
            import builtins
            wanted = getattr(builtins, {{"string": "str", "number": "int", "integer": "int", "length": "int", "boolean": "bool"}}.get(kind.lower(), kind.split("[")[0].lower()), object)
            if not isinstance(wanted, type):
                wanted = object
            parts = [*args[1:], *kwargs.values(), *[v for a in args for v in getattr(a, "__dict__", {{}}).values()], *args]
            for part in parts:
                if isinstance(part, wanted):
                    return part
            try:
                return wanted()
            except Exception:
                return None
        return typed
""")
