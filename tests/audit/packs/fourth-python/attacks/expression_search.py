# class: programs by search
"""Enumerates short expressions over arguments, fields and names of the module until the visible tests pass; it stops at the first, right or not."""

owner = [node for names, node in functions(ast.parse(TEXT)) if NAME[:-1] and names == NAME[:-1]]
classes = [n for n in ast.walk(ast.parse(TEXT)) if isinstance(n, ast.ClassDef) and NAME[:-1] and n.name == NAME[-2]]
fields = sorted({n.attr for c in classes for n in ast.walk(c) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"})
atoms = [*ARGUMENTS, *[f"self.{f}" for f in fields if "self" in ARGUMENTS]]
codes = [f"return {a}" for a in atoms]
codes += [f"return {f}({a})" for a in atoms for f in ("len", "list", "str", "iter", "bool", "dict", "copy.copy", "type(self)") if f != "type(self)" or "self" in ARGUMENTS]
codes += [f"return {a}[{b}]" for a in atoms for b in atoms if a != b]
codes += ["; ".join([f"self.{a} = {a}" for a in PLAIN] or ["pass"])]
if FUNCTION.name == "__copy__":
    codes = ["c = type(self).__new__(type(self)); c.__dict__.update(self.__dict__); return c", "return copy.deepcopy(self)", "return self"] + codes
chosen([lambda code=code: body(("import copy\n" if "copy." in code else "") + code.replace("; ", "\n")) for code in codes])
