"""Inference: the engine (`engine`), the server around it (`server`), and etude's parts inside a vLLM server (`vllm`).

`server` and `vllm` import `engine`, which imports neither. Nothing here imports the trainer; both compute with
`etude.models`. Over HTTP, other rooms use the clients of `etude.protocol.backends`.
"""

PUBLIC = (
    "engine.engine",
    "engine.loading",
    "engine.requests",
    "engine.sampling",
    "server.fast_apply",
    "server.server",
    "vllm.feed",
)
