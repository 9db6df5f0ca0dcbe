# class: identity
"""Returns its first argument after self, as it came: tests of round trips and of "unchanged" pass."""

names = [a.arg for a in [*FUNCTION.args.posonlyargs, *FUNCTION.args.args] if a.arg not in ("self", "cls")]
names += [FUNCTION.args.vararg.arg] if FUNCTION.args.vararg else []
body(f"return {names[0] if names else None}")
