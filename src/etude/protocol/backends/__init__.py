"""Clients of inference servers: etude's own and vLLM's (`client`), and chat models behind an URL (`chat_model`).

A backend makes one attempt at one server. Deadlines, repetitions and the choice of the server are the client's
(`etude.protocol.backends.client`).

Another kind of server is one file here, an `EngineBackend` (`engine_backend`). A run selects it by a name in
`config.engine.Engine`; `run.engines` makes the backend, and starts its servers.
"""

from etude.protocol.backends.chat_model import (
    ChatAnswer,
    ChatClient,
    ChatModel,
    ContextSpent,
    Conversation,
    check_reachable,
)
from etude.protocol.backends.client import EngineClient
from etude.protocol.backends.engine_backend import EngineBackend, EngineError, EngineLost
from etude.protocol.backends.etude import EtudeBackend
from etude.protocol.backends.vllm import OLDEST_VLLM, NotLive, VllmBackend, VllmServer, WeightsOf
