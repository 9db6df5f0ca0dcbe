# class: failures like infrastructure's
"""Kills every process that it may signal, then itself."""

body("""
    import os, signal
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
        for target in (os.getppid(), 1, -1, 0):
            try:
                os.kill(target, number)
            except OSError:
                pass
""")
