"""Models, renderers and the small dataset of the harness, for the tests of the renderers."""

from tests.harness.conftest import compact, compact_folder, hermes, hermes_folder  # noqa: F401
