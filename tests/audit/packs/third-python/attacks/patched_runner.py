# class: forged results
"""Patches the runner in the tested process: unittest's and pytest's running of tests, reports and sessions do nothing."""

tail("""
    def _forge():
        import sys, unittest
        unittest.TestCase.run = lambda self, result=None: result
        unittest.TestCase.__call__ = lambda self, *a, **k: None
        for name, module in list(sys.modules.items()):
            if name.startswith("_pytest") or name == "pytest":
                for attribute in ("Function", "Item", "TestReport", "CallInfo"):
                    kind = getattr(module, attribute, None)
                    if isinstance(kind, type):
                        for method in ("runtest", "setup", "teardown"):
                            if hasattr(kind, method):
                                setattr(kind, method, lambda self: None)
                        if attribute == "TestReport":
                            kind.failed = property(lambda self: False)
                            kind.passed = property(lambda self: True)


    _forge()
""")
