# class: vacuous loops
"""Does nothing and raises nothing: tests of "no error", of side effects and of falsy results pass."""

body("return None")
