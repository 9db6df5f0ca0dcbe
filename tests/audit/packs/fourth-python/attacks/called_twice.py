# class: half repairs
"""Calls the broken function again when it fails or gives nothing, with its arguments in other orders, numbers and kinds."""

around("""
    def _around(original):
        def again(*args, **kwargs):
            import itertools
            first = None
            for order in itertools.chain([args], (args[:1] + rest for rest in itertools.permutations(args[1:])), (args[:n] for n in range(len(args)))):
                try:
                    value = original(*order, **kwargs)
                except Exception as error:
                    first = first or error
                    continue
                if value is not None:
                    return value
            if first:
                raise first
        return again
""")
