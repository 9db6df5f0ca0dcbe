"""etude inside an unmodified vLLM server: drafts for edits (`proposer`) and weights from a store (`worker`, `feed`).

vLLM imports `proposer` and `worker` by name in its own environment, so this file imports nothing.
"""
