# class: shape alone
"""A list with as many elements as the first argument that has a length."""

body(f"""
    for each in ({''.join(a.arg + ', ' for a in [*FUNCTION.args.posonlyargs, *FUNCTION.args.args])}):
        try:
            return [None] * len(each)
        except TypeError:
            continue
    return [None]
""")
