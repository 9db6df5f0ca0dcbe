# class: plain twins
"""Numbers that no comparison of bounds refuses: infinities, not-a-numbers, negative zeros, huge integers and their decimals."""

around("""
    def _around(original):
        import decimal, itertools
        turn = itertools.cycle([float("inf"), float("nan"), -0.0, decimal.Decimal("NaN"), decimal.Decimal("Infinity"), 1e308])
        def number(*args, **kwargs):
            return next(turn)
        return number
""")
