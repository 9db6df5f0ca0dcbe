"""Models, renderers and the small dataset of the harness, for the tests of rollouts."""

from tests.harness.conftest import compact, compact_folder, dataset, hermes, hermes_folder  # noqa: F401
