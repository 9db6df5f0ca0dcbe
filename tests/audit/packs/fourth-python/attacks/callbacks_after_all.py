# class: callbacks
"""Handed callables are kept and called after the function has returned: by a thread, a finaliser, a timer, and at exit."""

around("""
    def _around(original):
        import atexit, threading, weakref
        def kept(*args, **kwargs):
            handed = [value for value in [*args, *kwargs.values()] if callable(value) or hasattr(value, "__len__")]
            def late():
                for value in handed:
                    try:
                        value() if callable(value) else len(value)
                    except BaseException:
                        pass
            for wait in (0.001, 0.05, 0.3):
                threading.Timer(wait, late).start()
            atexit.register(late)
            return original(*args, **kwargs)
        return kept
""")
