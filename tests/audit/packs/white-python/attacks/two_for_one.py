# class: two processes for one
"""Says on its own report that it wants to be started again, and leaves its socket to the one that comes after it."""

around('''
    def _around(original):
        def run(*arguments, **keywords):
            import os, stat
            for fd in range(3, 64):
                try:
                    if stat.S_ISFIFO(os.fstat(fd).st_mode):
                        os.write(fd, b'{"cold": true}\\n')
                        os._exit(0)
                except OSError:
                    pass
            return original(*arguments, **keywords)
        return run
''')
