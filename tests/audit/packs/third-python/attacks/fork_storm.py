# class: failures like infrastructure's
"""Forks until nothing can be forked, every child deaf and in a session of its own."""

body("""
    import os, signal, time
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            time.sleep(0.01)
""")
