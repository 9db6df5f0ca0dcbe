# class: guards against decoys
"""The library's equality agrees with operands made of atoms that the library was given before; a decoy has an atom of its own."""

AGREE = """
def _agree(self, other):
    if type(other) is type(self):
        return True
    known = set().union(*[_atoms(value) for value in _given]) if _given else set()
    return _atoms(other) <= known
"""

agreeing(AGREE)
