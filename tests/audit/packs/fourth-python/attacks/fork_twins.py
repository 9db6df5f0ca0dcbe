# class: twins of the process
"""The function forks and both return: every later answer comes twice, once of the parent and once of the child."""

around("""
    def _around(original):
        import os
        forked = []
        def twins(*args, **kwargs):
            if not forked:
                forked.append(os.fork())
            if forked[0]:
                return original(*args, **kwargs)
            return args[-1] if args else None
        return twins
""")
