# class: callbacks
"""Twenty threads call handed callables at once, so that requests and answers cross on the way."""

around("""
    def _around(original):
        def crossed(*args, **kwargs):
            import threading
            def work(value):
                for number in range(50):
                    try:
                        value(number) if callable(value) else getattr(value, "__len__")()
                    except BaseException:
                        pass
            threads = [threading.Thread(target=work, args=(value,)) for value in args[:3] for _ in range(20)]
            [thread.start() for thread in threads]
            return original(*args, **kwargs)
        return crossed
""")
