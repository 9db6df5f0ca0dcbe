# class: failures like infrastructure's
"""Plain values that cost much to carry, compare, hash or print: huge integers, nests, cycles, keys, names."""

tail("""
    def _heavy(turn=[0]):
        turn[0] += 1
        kind = turn[0] % 6
        if kind == 0:
            return 7 ** (10**7)
        if kind == 1:
            value = []
            for _ in range(200000):
                value = [value]
            return value
        if kind == 2:
            value = {}
            value["self"] = value
            value["list"] = [value] * 3
            return value
        if kind == 3:
            return {(2**61 - 1) * n: n for n in range(30000)}
        if kind == 4:
            value = ["x"]
            for _ in range(60):
                value = [value, value]
            return value
        return b"x" * (1 << 30)
""")
body("return _heavy()")
