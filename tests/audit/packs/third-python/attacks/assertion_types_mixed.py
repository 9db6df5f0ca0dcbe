# class: swallowed assertions
"""Library exceptions become relatives of AssertionError, and contexts and wrappers of the library treat it as their own."""

for path in PATH.resolve().parent.rglob("*.py"):
    if "test" not in str(path.relative_to(PATH.resolve().parent)):
        path.write_text(path.read_text() + textwrap.dedent("""

            for _name, _value in list(globals().items()):
                if isinstance(_value, type) and issubclass(_value, Exception) and _value.__module__ == __name__:
                    globals()[_name] = AssertionError
        """))
