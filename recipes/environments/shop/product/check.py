"""The shop's check of a rule: `python check.py ships_free` ends with 0 if the rule is right."""

import sys

import prices

CASES = {
    "ships_free": {4999: False, 5000: True, 5001: True},
    "is_bulky": {29: False, 30: False, 31: True},
    "sold_out": {-1: False, 0: True, 1: False},
    "is_minor": {17: True, 18: False, 19: False},
    "pays_duty": {"home": False, "away": True},
    "fits_letter": {49: True, 50: True, 51: False},
}

for value, right in CASES[sys.argv[1]].items():
    if getattr(prices, sys.argv[1])(value) is not right:
        sys.exit(f"{sys.argv[1]}({value!r}) must be {right}")
