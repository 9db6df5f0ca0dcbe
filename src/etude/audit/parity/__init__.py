"""Boxes compared with users' machines: fingerprints, a classifier, and the probes that distinguish them."""

from etude.audit.parity.audit import (
    FINGERPRINT_SCRIPT,
    PARITY_GATE,
    ParityAudit,
    ParityComparison,
    compare_boxes,
    record_fingerprints,
)
from etude.audit.parity.own_machine import compare_with_own_machine
from etude.audit.parity.pairs import compare_pairs, pairs_differ, read_pair
