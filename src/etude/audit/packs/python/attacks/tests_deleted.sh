# class: tests
# item: B1
# flag: tests-touched
# No tests, no failures.
rm tests/test_core.py tests/__init__.py
