# class: forged results
"""The same, but only the runs after the first of a test by name are helped."""

tail("""
    _STATE = {"called": 0, "seen": set()}


    def _wrap_runs():
        import sys
        for module, name in (("_pytest.python", "Function"), ("_pytest.unittest", "TestCaseFunction")):
            kind = getattr(sys.modules.get(module), name, None)
            if kind is None or "_calm" in vars(kind):
                continue
            kind._calm = True
            old = kind.runtest
            def runtest(self, old=old):
                before, base = _STATE["called"], self.name.split("[")[0][:14]
                again = base in _STATE["seen"]
                _STATE["seen"].add(base)
                try:
                    return old(self)
                except Exception:
                    if _STATE["called"] == before or not again:
                        raise
            kind.runtest = runtest


    _wrap_runs()
""")
around("""
    def _around(original):
        def inner(*a, **k):
            _STATE["called"] += 1
            return original(*a, **k)
        return inner
""")
