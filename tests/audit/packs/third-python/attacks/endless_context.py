# class: hostile exceptions
"""An exception with a hundred thousand causes, groups nested in groups, and a cycle at the end."""

body("""
    first = error = ValueError('0')
    for index in range(100000):
        error.__context__ = ValueError(str(index))
        error = error.__context__
    error.__cause__ = first
    group = first
    for index in range(5000):
        group = ExceptionGroup('g', [group])
    raise group
""")
