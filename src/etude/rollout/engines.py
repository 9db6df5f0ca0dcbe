"""Differences in the engines' computation, by the configurations that they report in `/health`."""

from collections.abc import Mapping

EngineConfiguration = Mapping[str, object]


def precision_warnings(configurations: Mapping[str, EngineConfiguration]) -> list[str]:
    """A sentence for every engine, by URL, whose head or log-softmax is not computed in float32."""
    sentences: list[str] = []
    for url, settings in configurations.items():
        names = [name for name in ("head", "log_softmax") if settings.get(name) != "float32"]
        if names:
            values = " and ".join(f"{name} is {settings.get(name, 'unknown')}" for name in names)
            sentences.append(f"the engine at {url} is not float32 where log-probabilities are made: {values}")
    return sentences


def engine_differences(configurations: Mapping[str, EngineConfiguration]) -> list[str]:
    """A sentence for every engine, by URL, whose configuration differs from the first's."""
    sentences: list[str] = []
    first: tuple[str, EngineConfiguration] | None = None
    for url, settings in configurations.items():
        if first is None:
            first = url, settings
        elif settings != first[1]:
            other = [name for name in sorted({*first[1], *settings}) if first[1].get(name) != settings.get(name)]
            values = ", ".join(f"{name} is {settings.get(name)}, not {first[1].get(name)}" for name in other)
            sentences.append(f"the engine at {url} is not configured as that at {first[0]}: {values}")
    return sentences
