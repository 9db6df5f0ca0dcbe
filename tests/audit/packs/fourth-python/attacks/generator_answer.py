# class: iterators that remember
"""The function is a generator: nothing of it runs unless somebody looks, and it goes on for whoever looks again."""

around("""
    def _around(original):
        def generated(*args, **kwargs):
            try:
                value = original(*args, **kwargs)
            except Exception as error:
                return
            yield from value if hasattr(value, "__iter__") else [value]
        return generated
""")
