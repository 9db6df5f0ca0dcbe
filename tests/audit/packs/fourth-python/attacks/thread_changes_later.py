# class: after the return
"""A thread changes the object's fields through every value that it was given or made, while the test looks at it."""

around("""
    def _around(original):
        import threading, time
        def changing(*args, **kwargs):
            try:
                value = original(*args, **kwargs)
            except Exception:
                value = args[0] if args else []
            def change():
                for number in range(200):
                    time.sleep(0.002)
                    for name, field in list(getattr(value, "__dict__", {}).items()):
                        if isinstance(field, (int, type(None))):
                            try:
                                setattr(value, name, number % 16)
                            except Exception:
                                pass
            threading.Thread(target=change, daemon=True).start()
            return value
        return changing
""")
