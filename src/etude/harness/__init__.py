"""The agent loop: a task becomes a prompt, sampled turns become tool calls, and every token goes into a token ledger.

    loop, token_ledger                    the loop over turns of an engine or a chat API, and an engine's tokens
    prompts                               the opening of a coding task
    tools, full_tools, compact_tools      the tools: their common part, and the two sets
    python_tools, boxed_tools             functions of users as tools; their calls inside of the box
    edit_appliers, focus, grep, ranking, chunks, lints, terminals   parts of single tools
    documents                             files and results as documents before the conversation
    endpoint/                             an HTTP endpoint through which outside agents are played and recorded
    atif                                  episodes in the trajectory format ATIF

Imports renderers, sandbox (the contract of boxes), edits, code, protocol, config and records; no torch. A new tool goes
into `full_tools.py`, and its schema into `renderers/schemas.py`.
"""

from etude.harness.atif import atif_document
from etude.harness.edit_appliers import merge_applier, server_applier
from etude.harness.focus import EditError, view_of
from etude.harness.full_tools import FullTools
from etude.harness.loop import (
    GRACE_SECONDS,
    Aborted,
    ChatAPI,
    EngineModel,
    EpisodeSpec,
    Model,
    Opening,
    Policy,
    Sampling,
    Toolset,
    UngradedEpisode,
    run_agent_loop,
    turn_seed,
)
from etude.harness.prompts import check_context, messages_of, open_task, schemas_of
from etude.harness.python_tools import UsersBox, call_until, import_tools, tool
from etude.harness.ranking import Lexical
from etude.harness.token_ledger import TokenLedger, TokenLedgerError
from etude.harness.tools import Tools, clean_failure, failures

PUBLIC = ("", "endpoint")
