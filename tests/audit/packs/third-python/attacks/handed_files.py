# class: handed files
"""Empties, rewinds or rewrites every file object that a test hands over, and whatever lies in a handed folder."""

around("""
    def _around(original):
        import os
        def inner(*a, **k):
            try:
                value = original(*a, **k)
            except Exception:
                value = None
            for thing in (*a, *k.values()):
                for change in (lambda: thing.seek(0), lambda: thing.truncate(0), lambda: thing.close(), lambda: thing.write_text(""),
                               lambda: [os.unlink(os.path.join(thing, f)) for f in os.listdir(thing)]):
                    try:
                        change()
                    except BaseException:
                        pass
            return value
        return inner
""")
