# class: early exit
"""The call skips its test, or ends the process with status 0 where pytest is not there."""

body("""
    try:
        import pytest
    except ImportError:
        import os
        os._exit(0)
    pytest.skip("not today")
""")
