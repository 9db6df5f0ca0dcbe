"""Items E: whether a classifier can distinguish boxes from users' machines, per group of probes (E1 to E8), and the
agent's first requests from those of production (E9).

The test is that of `etude doctor parity` (`audit/parity/audit.py`), with the same boxes, probes, exceptions and gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.audit.parity import audit
from etude.config import SandboxConfig
from etude.errors import UserError
from etude.sandbox import FingerprintSample, ProfileSource, load_profiles, read_fingerprints

ITEMS = tuple(f"E{n}" for n in range(1, 10))
REASONS = {
    **dict.fromkeys(ITEMS, "needs fingerprints of production machines: --against FILE"),
    "E9": "needs fingerprints of production's requests (fingerprint.py --requests) in --against, and --dataset",
}
SHOWN = 5  # distinguishing probes, at most


@dataclass(frozen=True)
class ItemResult:
    """The result of one item: `word` is its AUC, `skipped` why it was not played, `problem` the probes that differ."""

    word: str = ""
    problem: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class FingerprintsAgainst:
    """The fingerprints and requests to compare with, and the boxes to compare; made by `fingerprints_against`."""

    machines: Sequence[FingerprintSample]
    requests: Sequence[FingerprintSample]
    boxes: int
    dataset: Path | None
    machine_profiles: ProfileSource
    config: SandboxConfig | None = None

    async def results(self, progress: audit.Progress) -> dict[str, ItemResult]:
        """The results of items that can be played. Raises UserError, RunFailed, and BoxError without boxes."""
        items: dict[str, audit.Item] = {}
        if self.machines:
            boxes = await audit.box_samples(
                self.boxes,
                machine_profiles=self.machine_profiles,
                dataset=self.dataset,
                boxes=self.config,
                progress=progress,
            )
            items |= audit.by_item(boxes, self.machines)
        if self.requests and self.dataset is not None:
            items |= audit.by_item(audit.requests(self.boxes, self.dataset), self.requests)
        return {name: result_of(item) for name, item in items.items()}


def fingerprints_against(
    files: Sequence[Path],
    boxes: int,
    *,
    dataset: Path | None,
    machine_profiles: Path | None,
    config: SandboxConfig | None = None,
) -> FingerprintsAgainst:
    """The samples and settings of a comparison with boxes as a run makes them. Raises UserError."""
    samples = read_fingerprints(files)
    sides = [[sample for sample in samples if sample.is_request is requests] for requests in (False, True)]
    if any(0 < len(side) < audit.MIN_SAMPLES for side in sides) or boxes < audit.MIN_SAMPLES:
        raise UserError(f"fewer than {audit.MIN_SAMPLES} fingerprints of a side say nothing: record more, or --boxes.")
    return FingerprintsAgainst(
        sides[0],
        sides[1],
        boxes,
        dataset,
        () if machine_profiles is None else load_profiles(machine_profiles),
        config,
    )


def result_of(item: audit.Item) -> ItemResult:
    """The result of an item by the gate of the parity audit: the AUC without the declared exceptions."""
    if item.gated is None:
        named = ", ".join(tell.probe for tell in item.tells) or "none of them differs"
        return ItemResult(skipped=f"all of its probes are declared exceptions (AUC {item.whole.mean:.2f}): {named}")
    figure = f"{item.gated.mean:.2f}"
    if item.gated.mean <= audit.PARITY_GATE:
        return ItemResult(word=figure)
    telling = [
        f"{tell.probe} {tell.auc:.2f}" for tell in item.tells if tell.auc > audit.PARITY_GATE and not tell.exception
    ]
    named = ", ".join(telling[:SHOWN]) or "no probe by itself"
    return ItemResult(word=figure, problem=f"AUC {figure} [{item.gated.low:.2f}, {item.gated.high:.2f}]: {named}")
