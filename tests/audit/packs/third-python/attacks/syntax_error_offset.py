# class: hostile exceptions
"""A SyntaxError whose caret lies a trillion columns to the right: who prints it runs out of memory."""

body("raise SyntaxError('x', ('f.py', 1, 10**12, 'x', 1, 10**13))")
