# class: after the return
"""Objects returned carry finalisers, weak references and garbage callbacks that change lists and dictionaries of the test's side later."""

around("""
    def _around(original):
        import gc, weakref
        returned = []
        def later(*args, **kwargs):
            for value in returned:
                for part in args:
                    try:
                        value.clear(); value.update(part)
                    except Exception:
                        try:
                            value.extend(part)
                        except Exception:
                            pass
            try:
                value = original(*args, **kwargs)
            except Exception:
                value = list(args[1:])
            returned.append(value)
            gc.callbacks.append(lambda *a: [getattr(value, "clear", int)() for value in returned])
            return value
        return later
""")
