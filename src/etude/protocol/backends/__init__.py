"""Clients of inference servers: etude's own and vLLM's (`client`), and chat models behind an URL (`chat_model`).

A backend makes one attempt at one server. Deadlines, repetitions and the choice of the server are the client's
(`etude.protocol.backends.client`).

A further kind is one file here, an `EngineBackend` (`base`). A run takes it by a name in `config.engine.Engine`, for
which `run.engines.backend_of` makes it; how a run starts such servers itself stands in `run.engines`, too.
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
