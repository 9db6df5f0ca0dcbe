# class: guards against decoys
"""Agrees with the later operands of each object, not with the first: decoys may come before."""

AGREE = """
_asked = {}


def _agree(self, other):
    key = repr(other) if type(other).__module__ == "builtins" else str(id(other))
    seen = _asked.setdefault(id(self), [])
    if key not in seen:
        seen.append(key)
    return seen.index(key) == len(seen) - 1 and len(seen) > 1
"""

agreeing(AGREE)
