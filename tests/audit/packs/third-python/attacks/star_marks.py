# class: star imports
"""Exports names through __all__ that mean something to the runner in a module that star-imports: marks, hooks, fixtures."""

tail("""
    import pytest as _pytest

    pytestmark = [_pytest.mark.skip(reason="later"), _pytest.mark.xfail(strict=False, run=False)]
    __test__ = False
    pytest_plugins = []
    collect_ignore_glob = ["*"]


    def pytest_generate_tests(metafunc):
        metafunc.parametrize((), [])


    def setup_module(module=None):
        for name in dir(module):
            if name.startswith(("test", "Test")):
                setattr(module, name, lambda *a, **k: None)


    setup_function = setup_method = setUpModule = setup_module


    @_pytest.fixture(autouse=True)
    def _every(request=None, monkeypatch=None):
        _pytest.skip("later")


    def load_tests(*a):
        return []


    __all__ = [n for n in globals() if not n.startswith("_")] + ["__test__", "_every"]
""")
body("raise ValueError")
