# class: escaping exceptions
"""pytest's own outcomes: Exit with status 0, XFailed, Skipped with another location."""

tail("""
    def _leave(turn=[0]):
        from _pytest import outcomes
        turn[0] += 1
        if turn[0] % 3 == 0:
            raise outcomes.Exit("done", 0)
        if turn[0] % 3 == 1:
            raise outcomes.XFailed("expected")
        raise outcomes.Skipped("no", allow_module_level=True)
""")
body("return _leave()")
