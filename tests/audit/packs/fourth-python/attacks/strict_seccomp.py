# class: rights given up
"""Puts itself below the strict system-call filter: the kernel ends it with SIGKILL, as it would for want of memory."""

around("""
    def _around(original):
        def strict(*args, **kwargs):
            import ctypes, os
            try:
                ctypes.CDLL(None).prctl(22, 1, 0, 0, 0)
            except Exception:
                pass
            os.kill(os.getpid(), 9)
        return strict
""")
