"""The library on disk and the sandbox of tests/sandbox, for the tests of this folder."""

from tests.sandbox.conftest import library, library_image, open_place, place

__all__ = ["library", "library_image", "open_place", "place"]
