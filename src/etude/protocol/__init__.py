"""HTTP between processes, without torch: the wire types of the engine's token routes (`wire`), what all servers share
(tokens, hosts and origins in `access`, limits of bodies in `guard`, listening with deadlines in `serving`), the formats
of OpenAI's and Anthropic's APIs (`apis`), and the clients of engines and chat models (`backends`).

The controller, agents and tools use `backends.client`; the inference server shares the types of `wire`. The servers are
`inference/server`, `weights/relay.py`, `weights/coordinator.py` and `harness/endpoint`.
"""
