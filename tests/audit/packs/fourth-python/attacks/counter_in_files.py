# class: state between tests
"""A counter in /tmp, shared memory and the environment says how many processes have tested it; each time another answer is given."""

around("""
    def _around(original):
        import os
        count = 0
        for path in ("/tmp/.count", "/dev/shm/.count", "/var/tmp/.count", ".count"):
            try:
                count = max(count, os.path.getsize(path) if os.path.exists(path) else 0)
                with open(path, "ab") as file:
                    file.write(b"x")
            except OSError:
                pass
        def counted(*args, **kwargs):
            choices = [args[0] if args else None, None, True, 0, "", [], args[-1] if args else None]
            try:
                choices.insert(0, original(*args, **kwargs))
            except Exception:
                pass
            return choices[count % len(choices)]
        return counted
""")
