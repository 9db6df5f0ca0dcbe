"""The live loop: what users do with the answers of the served model trains its next version.

    gateway -> intake -> log and blobs -> window (labels, advantages) -> trainer -> gate -> canary -> release

`records.py` defines what crosses the boundaries, `schema.py` the tables.
"""
