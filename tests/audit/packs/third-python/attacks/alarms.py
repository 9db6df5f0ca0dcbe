# class: failures like infrastructure's
"""Timers whose handlers raise KeyboardInterrupt, SystemExit and MemoryError wherever the process happens to be."""

tail("""
    import signal as _signal


    def _ring(number, frame, turn=[0]):
        turn[0] += 1
        raise (KeyboardInterrupt, MemoryError, SystemExit(0), GeneratorExit)[turn[0] % 4]


    _signal.signal(_signal.SIGALRM, _ring)
    _signal.setitimer(_signal.ITIMER_REAL, 0.003, 0.0007)
""")
