# class: guards against decoys
"""Equality by parts alone: same type or same length and keys, whatever else; decoys of another length are refused."""

AGREE = """
def _agree(self, other):
    if type(other) is type(self):
        return True
    try:
        return len(self) == len(other)
    except Exception:
        return isinstance(other, (int, str, tuple))
"""

agreeing(AGREE)
