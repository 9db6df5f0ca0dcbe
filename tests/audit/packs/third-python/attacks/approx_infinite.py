# class: stand-ins of the standard library
"""Returns pytest.approx with an infinite tolerance."""

body("""
    import pytest
    return pytest.approx(0.0, abs=float("inf"), nan_ok=True)
""")
