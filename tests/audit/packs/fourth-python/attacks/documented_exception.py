# class: errors of the documents
"""Raises the errors that docstring, README and changelog name, whenever the broken function gives a falsy value or another error."""

words = re.findall(r"\b[A-Z]\w*(?:Error|Exception|Warning)\b", (ast.get_docstring(FUNCTION) or "") + TEXT)
name = max(set(words), key=words.count) if words else "KeyError"
around(f"""
    def _around(original):
        def documented(*args, **kwargs):
            try:
                value = original(*args, **kwargs)
            except Exception as error:
                value = None
            if not value:
                raise {name}(*args[1:])
            return value
        return documented
""")
