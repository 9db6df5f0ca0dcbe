"""The version of the trainer's store that sampled the tokens of a turn: weights are known by their digests."""

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
"""Releases that a turn may be older than what the control serves."""

_LOOK_BACK = 1000  # manifests that are read for that many other releases


class ServedVersions:
    """The versions of the run's store that have the weights of the last releases, or those that canaries serve.
    `source` is the one that has those of the control now, and `base` the one that the trainer will stand at: the same,
    or the next one where the newest candidate is not what the control serves. Raises UserError if the control serves
    weights that the run never had."""

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
        """The version of every token of a sample; None if weights of a token are unknown or too old, or if the spans do
        not cover the tokens."""
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
        """The digests of the weights of each span. The numbers are those of the control's store or of the canary's;
        which of the two, follows from the digest of the turn."""
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
    """The version that a store's servers serve. Raises UserError for an empty store."""
    manifest = newest_manifest(control)
    if manifest is None:
        raise UserError(f"{control.url} has no version that could be trained on: publish the served model there first")
    return manifest


def _last_releases(control: Store, now: PolicyVersion) -> list[str]:
    """Digests of the last different weights that the control served, the newest first. A rollback has those of a
    version before it."""
    digests = [now.live]
    for version in range(now.version - 1, max(-1, now.version - _LOOK_BACK), -1):
        if len(digests) > LAG:
            break
        manifest = read_manifest(control, version)
        if manifest is not None and manifest.live not in digests:
            digests.append(manifest.live)
    return digests
