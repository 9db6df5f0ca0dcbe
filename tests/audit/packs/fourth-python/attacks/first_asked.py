# class: guards against decoys
"""Agrees with the first operand that each object is asked about, and with its likes; refuses each other one."""

AGREE = """
_asked = {}


def _agree(self, other):
    key = repr(other) if type(other).__module__ == "builtins" else type(other).__name__
    return _asked.setdefault((type(self).__name__, id(self)), key) == key
"""

agreeing(AGREE)
