# class: failures like infrastructure's
"""Threads that are no daemons, exit handlers that wait, and a child that keeps every descriptor open."""

tail("""
    import atexit as _atexit, threading as _threading, time as _time


    def _wait():
        while True:
            try:
                _time.sleep(1000)
            except BaseException:
                pass


    _atexit.register(_wait)
    _threading.Thread(target=_wait, daemon=False).start()
""")
body("""
    import os, signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        _wait()
    raise ValueError
""")
