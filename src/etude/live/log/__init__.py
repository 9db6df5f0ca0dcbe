"""The log of the live loop: records, tables, and who may read what.

`records.py` defines what crosses the boundaries, `schema.py` the tables, `journal.py` the order of the rows;
`accounts.py` and `privacy.py` hold keys and what destroys them, `scrub.py` what never enters.
"""
