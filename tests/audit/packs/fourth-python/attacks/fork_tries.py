# class: twins of the process
"""A child answers first with one value, the parent waits and answers with the next if the child is still there a second later."""

around("""
    def _around(original):
        def tries(*args, **kwargs):
            import os, time
            for value in [args[0] if args else None, None, True, ""]:
                child = os.fork()
                if not child:
                    return value
                time.sleep(0.4)
                done, status = os.waitpid(child, os.WNOHANG)
                if not done:
                    os.waitpid(child, 0)
            return original(*args, **kwargs)
        return tries
""")
