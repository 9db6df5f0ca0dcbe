# class: rights given up
"""Undumpable, a subreaper, dying with a thread, another name and personality, with own file-size and processor limits."""

around("""
    def _around(original):
        def given(*args, **kwargs):
            import ctypes, os, resource
            try:
                libc = ctypes.CDLL(None)
                for call in ((4, 0), (36, 1), (1, 9), (15, b"verifier"), (38, 1), (35, 8, 0)):
                    libc.prctl(*call, 0, 0, 0)
                libc.personality(0x0040000)
            except Exception:
                pass
            for name in ("RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_NOFILE"):
                try:
                    resource.setrlimit(getattr(resource, name), (0, 0))
                except Exception:
                    pass
            return original(*args, **kwargs)
        return given
""")
