"""The log of the live loop: records, tables, keys of accounts, and privacy.

`records.py` defines the records, `schema.py` their tables, `journal.py` the order of the rows; `accounts.py` has the
keys of accounts, `privacy.py` destroys them and their contents, `scrub.py` removes secrets before a record is written.
"""
