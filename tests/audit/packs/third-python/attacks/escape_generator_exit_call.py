# class: escaping exceptions
"""The call itself leaves through GeneratorExit."""

body("raise GeneratorExit()")
