"""Clients of inference servers: etude's own (`client`) and vLLM's (`vllm`), and chat models behind an URL
(`chat_model`, in the formats of `chat_formats`).

Another kind of server is one file here, an `EngineBackend` of `client`. A run selects it by a name in
`config.engine.Engine`; `run.engines` makes the backend, and starts its servers.
"""

from etude.protocol.backends.chat_formats import ChatAnswer, ChatModel, Conversation
from etude.protocol.backends.chat_model import ChatClient, ContextSpent, ConversationRefused, check_reachable
from etude.protocol.backends.client import EngineBackend, EngineClient, EngineError, EngineLost, EtudeBackend, OnPart
from etude.protocol.backends.vllm import (
    OLDEST_VLLM,
    NotLive,
    VllmBackend,
    VllmServer,
    WeightsOf,
    refused_parallelism,
)
