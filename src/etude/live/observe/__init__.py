"""The observer on a developer's machine: the survival of edits in a work tree, sent to the gateway as signals.

Imports nothing of the other folders but `live/log/records.py`.
"""
