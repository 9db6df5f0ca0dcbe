"""How the engine is spoken to: its client and the wire types of its token routes. Imports no torch.

The controller, agents and tools use `EngineClient`; the inference server shares the types of `wire`.
"""
