"""Scripted attacks on boxes and graders, and the required result of each: `etude doctor sandbox` runs them all."""

from etude.audit.attacks.attack_suite import run_attacks
from etude.audit.attacks.fingerprints import FingerprintsAgainst, fingerprints_against
from etude.audit.attacks.packs import load_pack, pack_table, play_pack
from etude.audit.attacks.report import INSIDE, ITEMS, OUTSIDE, AttackReport, AttackResult
