# class: failures like infrastructure's
"""Stops its own process: alive, without an answer, and deaf to anything but SIGKILL."""

body("""
    import os, signal
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    os.kill(os.getpid(), signal.SIGSTOP)
""")
