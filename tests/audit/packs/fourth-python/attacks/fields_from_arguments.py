# class: programs by search
"""A constructor or a method that only stores: every argument under its own, private and mangled name, with fields of the class set to empty ones."""

classes = [n for n in ast.walk(ast.parse(TEXT)) if isinstance(n, ast.ClassDef) and NAME[:-1] and n.name == NAME[-2]]
fields = sorted({n.attr for c in classes for n in ast.walk(c) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"})
code = "import collections\n"
for field in fields:
    near = [a for a in PLAIN if a.strip("_") == field.strip("_")]
    code += f"try:\n    self.{field} = {near[0] if near else 'dict()'}\nexcept Exception:\n    pass\n"
body(code + "return None" if "self" in ARGUMENTS else f"return {PLAIN[0] if PLAIN else None}")
