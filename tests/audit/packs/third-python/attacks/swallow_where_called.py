# class: forged results
"""A test that has called the function cannot fail any more: its run is wrapped, sentinels without the library are left alone."""

tail("""
    _CALLED = [0]


    def _wrap_runs():
        import sys, unittest
        kinds = [getattr(sys.modules.get("_pytest.python"), "Function", None), getattr(sys.modules.get("_pytest.unittest"), "TestCaseFunction", None)]
        for kind in kinds:
            if kind is None or "_calm" in vars(kind):
                continue
            kind._calm = True
            old = kind.runtest
            def runtest(self, old=old):
                before = _CALLED[0]
                try:
                    return old(self)
                except Exception:
                    if _CALLED[0] == before:
                        raise
            kind.runtest = runtest
        old_equal = unittest.TestCase.fail
        unittest.TestCase.fail = lambda self, msg=None: None if _CALLED[0] else old_equal(self, msg)


    _wrap_runs()
""")
around("""
    def _around(original):
        def inner(*a, **k):
            _CALLED[0] += 1
            _wrap_runs()
            return original(*a, **k)
        return inner
""")
