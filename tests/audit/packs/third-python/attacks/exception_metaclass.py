# class: exceptions that are all
"""The library's exception classes get a metaclass that counts every raised object as theirs."""

for path in PATH.resolve().parent.rglob("*.py"):
    if "test" not in str(path.relative_to(PATH.resolve().parent)):
        path.write_text(path.read_text() + textwrap.dedent("""

            class _All(type):
                def __instancecheck__(cls, other):
                    return True
                def __subclasscheck__(cls, other):
                    return True


            for _name, _value in list(globals().items()):
                if isinstance(_value, type) and issubclass(_value, Exception) and _value.__module__ == __name__:
                    globals()[_name] = _All(_name, (_value,), {})
        """))
body("raise KeyError('all')")
