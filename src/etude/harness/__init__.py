"""The agent loop: a task becomes a prompt, sampled turns become tool calls, and every token goes into a token ledger.

    loop, prompts, token_ledger           the loop, the first tokens of an episode, and its tokens so far
    tools, full_tools, compact_tools      the tools: their common part, and the two sets
    edit_appliers, focus, grep, ranking, chunks, lints, terminals   what single tools need
    documents                             files and results as documents before the conversation
    endpoint/                             an HTTP endpoint through which outside agents are played and recorded
    atif                                  episodes in the trajectory format ATIF

Imports renderers, sandbox (the contract of boxes), edits, code, protocol and records; no torch. Public: in `loop`,
`run_agent_loop`, `EpisodeSpec`, `Sampling` and `Policy`. A new tool goes into `full_tools.py`, and its schema into
`renderers/schemas.py`.
"""
