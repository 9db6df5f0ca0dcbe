# class: forged standard values
"""Numbers of the standard library put together from lying parts: Fraction, UUID, range, complex, timedelta."""

tail("""
    class _Int(int):
        def __eq__(self, other):
            return True
        def __ne__(self, other):
            return False
        def __hash__(self):
            return 0
        def __sub__(self, other):
            return 0
        __rsub__ = __sub__
""")
body("""
    import fractions
    value = fractions.Fraction(0)
    value._numerator = _Int(0)
    value._denominator = _Int(1)
    return value
""")
