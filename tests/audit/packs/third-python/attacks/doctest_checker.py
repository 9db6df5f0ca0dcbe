# class: forged results
"""doctest's output checker, runner and parser in the process agree with every output."""

tail("""
    import doctest as _doctest
    _doctest.OutputChecker.check_output = lambda self, want, got, flags: True
    _doctest.DocTestRunner.run = lambda self, test, *a, **k: _doctest.TestResults(0, len(test.examples))
    _doctest.DocTestParser.get_examples = lambda self, string, name="": []
""")
