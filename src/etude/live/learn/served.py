"""The version, in the trainer's store, that sampled a turn's tokens: weights are identified by their digests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from etude.config import LiveConfig
from etude.errors import UserError
from etude.live.log.records import LiveSample
from etude.records import PolicyVersion
from etude.store import Store, open_store
from etude.weights import manifests, newest_manifest, read_manifest

LAG = 1
"""The age of a turn's weights, in releases behind the control's, up to which the turn is trained on."""

_LOOK_BACK = 1000  # manifests that are searched for these releases


class ServedVersions:
    """The versions of the run's store with the weights of the last releases or of canaries. `source` is the version
    with the control's present weights. `base` is the version that the trainer starts from: `source`, or, if the newest
    candidate has other weights than the control, the number after the candidate's. Raises UserError if the control
    serves weights that the run never had."""

    def __init__(self, config: LiveConfig, run: Store):
        self._clusters = {cluster.name: cluster for cluster in config.clusters}
        control = open_store(config.clusters[0].store)
        published, now = manifests(run), served(control)
        ours = {manifest.live: manifest.version for manifest in published} or {now.live: 0}
        if now.live not in ours:
            raise UserError(
                f"version {now.version} of {control.url}, which the control serves, is none of {run.url}: move that "
                "run away, and the next window begins one with the weights that are served"
            )
        self.source = self.base = ours[now.live]
        if published and published[-1].live != now.live:
            self.base = published[-1].version + 1
        ours[now.live] = self.base
        recent = {*_last_releases(control, now), *self._on_trial()}
        self._versions = {live: ours[live] for live in recent if live in ours}

    def of(self, sample: LiveSample) -> list[int] | None:
        """The version of every token of a sample; None for unknown or too old weights, or if the spans do not cover the
        tokens."""
        ends = [(0, 0), *((span.low, span.high) for span in sample.spans)]
        if any(low != before or high <= low for (_, before), (low, high) in pairwise(ends)):
            return None
        if ends[-1][1] != len(sample.ids) // 4:
            return None
        out: list[int] = []
        for span, digest in zip(sample.spans, self._digests(sample), strict=True):
            if (version := self._versions.get(digest)) is None:
                return None
            out += [version] * (span.high - span.low)
        return out

    def _on_trial(self) -> list[str]:
        stores = {cluster.canary_store for cluster in self._clusters.values()} - {"none"}
        return [
            manifest.live for store in sorted(stores) if (manifest := newest_manifest(open_store(store))) is not None
        ]

    def _digests(self, sample: LiveSample) -> Sequence[str]:
        """The digests of the weights of each span. Versions are numbers of the control's store or of the canary's; the
        digest of the turn tells which."""
        if len(sample.spans) == 1:
            return [sample.manifest]
        cluster = self._clusters.get(sample.cluster)
        stores = [] if cluster is None else [u for u in (cluster.store, cluster.canary_store) if u != "none"]
        for store in map(open_store, stores):
            manifests = [read_manifest(store, span.version) for span in sample.spans]
            digests = ["" if manifest is None else manifest.live for manifest in manifests]
            if sample.manifest in digests:
                return digests
        return [""] * len(sample.spans)


def served(control: Store) -> PolicyVersion:
    """The newest version of a store, which its servers serve. Raises UserError for an empty store."""
    manifest = newest_manifest(control)
    if manifest is None:
        raise UserError(f"{control.url} has no version that could be trained on: publish the served model there first")
    return manifest


def _last_releases(control: Store, now: PolicyVersion) -> list[str]:
    """Digests of the last different weights of the control, the newest first. A rollback repeats an earlier digest."""
    digests = [now.live]
    for version in range(now.version - 1, max(-1, now.version - _LOOK_BACK), -1):
        if len(digests) > LAG:
            break
        manifest = read_manifest(control, version)
        if manifest is not None and manifest.live not in digests:
            digests.append(manifest.live)
    return digests
