"""How the engine is spoken to: its client and the wire types of its token routes. Imports no torch.

The controller, agents and tools use `EngineClient`; the inference server shares the types of `wire`.
"""

from etude.protocol.client import EngineClient, EngineError
from etude.protocol.wire import GenerateRequest, SequenceScores

__all__ = ["EngineClient", "EngineError", "GenerateRequest", "SequenceScores"]
