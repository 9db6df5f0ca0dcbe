"""HTTP between processes, without torch: the wire types of the engine's token routes (`wire`), what all servers share
(tokens, hosts and origins in `access`, the asker of a request in `clients`, limits of bodies in `guard`, listening with
deadlines in `serving`), the formats of OpenAI's and Anthropic's APIs (`apis`), and the clients of engines and chat
models (`backends`).

The controller, agents and tools use `backends.client`; the inference server shares the types of `wire`. The servers are
`inference/server`, `weights/relay.py` and `harness/endpoint`.
"""

from etude.protocol.access import (
    LOOPBACK,
    TOKEN_VARIABLE,
    Access,
    Refusal,
    access_of,
    add_access_flags,
    bearer,
    bearers,
    headers,
    is_loopback,
    new_token,
    own_token,
)
from etude.protocol.clients import CLIENT_HEADER, NOBODY, Client, as_one_member, asking
from etude.protocol.guard import HANDLERS, Guarded, busy, characters, check_brackets, decoded, error
from etude.protocol.serving import open_listener, raise_file_limit, run_server, server_config
from etude.protocol.wire import (
    CONFLICT,
    DRAINING,
    JSON,
    MAX_NAME,
    MSGPACK,
    TURN_HEADER,
    WEIGHTS_HEADER,
    GenerateRequest,
    ScoreRequest,
    SequenceScores,
    ServedTokens,
    frame,
)

PUBLIC = ("", "apis", "apis.anthropic", "apis.chat", "apis.responses", "backends")
