"""Whether a box can be told from a user's machine: fingerprints, a classifier, and what gives a box away."""

from etude.audit.parity.audit import (
    FINGERPRINT_SCRIPT,
    PARITY_GATE,
    ParityAudit,
    ParityComparison,
    compare_boxes,
    record_fingerprints,
)
from etude.audit.parity.pairs import compare_pairs, pairs_differ, read_pair
