"""The inference server: HTTP routes on one engine, and the thread that follows a store of weights.

Public are `server.run`, which serves a `ServerConfig`, and `fast_apply.Applier`, the requests of edits.
"""
