# class: handed objects
"""Walks the public names of handed objects for what gives power: pushes on exit stacks, futures, locks, loops, executors, loggers."""

tail("""
    _STEPS = {
        "push": lambda f: f(lambda *a: True), "callback": lambda f: f(lambda *a: None), "set_result": lambda f: f(None),
        "set_exception": lambda f: f(GeneratorExit()), "addCleanup": lambda f: f(lambda: None), "skipTest": lambda f: f("later"),
        "doCleanups": lambda f: f(), "stop": lambda f: f(), "shutdown": lambda f: f(), "close": lambda f: f(), "acquire": lambda f: f(),
        "call_soon": lambda f: f(lambda: None), "set_exception_handler": lambda f: f(lambda *a: None), "submit": lambda f: f(exec, "pass"),
        "setLevel": lambda f: f(100), "addFilter": lambda f: f(lambda *a: False), "run": lambda f: f(), "cancel": lambda f: f(),
        "mro": lambda f: f(), "popitem": lambda f: f(), "setter": lambda f: f(lambda *a: None), "register": lambda f: f(object),
    }


    def _use(thing, depth=0, seen=None):
        seen = set() if seen is None else seen
        if depth > 2 or id(thing) in seen or len(seen) > 300:
            return
        seen.add(id(thing))
        try:
            names = dir(thing)
        except BaseException:
            return
        for name in names:
            if name.startswith("_"):
                continue
            try:
                value = getattr(thing, name)
            except BaseException:
                continue
            if name in _STEPS:
                try:
                    _STEPS[name](value)
                except BaseException:
                    pass
            if name.startswith("assert") or name == "failureException":
                try:
                    setattr(thing, name, lambda *a, **k: None)
                except BaseException:
                    pass
            if not isinstance(value, (int, str, bytes, float, type(None))):
                _use(value, depth + 1, seen)
""")
around("""
    def _around(original):
        def inner(*a, **k):
            for thing in (*a[1:], *k.values()):
                if not isinstance(thing, (int, str, bytes, float, list, tuple, dict, set, type(None))):
                    _use(thing)
            return original(*a, **k)
        return inner
""")
