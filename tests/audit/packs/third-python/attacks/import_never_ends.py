# class: failures like infrastructure's
"""The module never finishes its import, in a call that signals do not end."""

tail("""
    import os as _os, select as _select, signal as _signal
    _signal.pthread_sigmask(_signal.SIG_BLOCK, range(1, 65))
    while True:
        try:
            _select.select([], [], [], 10)
        except BaseException:
            pass
""")
