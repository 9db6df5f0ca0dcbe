"""The server of the simulated policy: its answers are texts of the nano model's dialect, and it keeps their tokens as
`etude serve` does.

    python -m benchmarks.live_simulation.server READY_FILE

The `seed` of a request names the draw of the policy: `seed_of(action, number)`.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.live_simulation.texts import ASKED, dialect, sampled, sampled_text
from benchmarks.live_stub import keeping_server
from etude.live.simulate.users import ACTIONS
from etude.protocol import TURN_HEADER
from etude.protocol.access import LOOPBACK
from etude.protocol.apis import read
from etude.protocol.serving import open_listener, run_server, server_config
from etude.protocol.wire import MSGPACK, ServedTokens


def seed_of(action: int, number: int) -> int:
    """The seed of an answer with an action of ACTIONS to request `number` of ASKED. -1, an edit after an answered
    question, is the first action's."""
    return max(action, 0) * len(ASKED) + number


@cache
def drawn(seed: int) -> ServedTokens:
    """The answer of a seed, without its prompt."""
    action, number = divmod(seed, len(ASKED))
    text = sampled_text(ACTIONS[action], number)
    turn = sampled(text)
    return ServedTokens(
        prompt_ids=b"",
        ids=np.array(turn.ids, "<i4").tobytes(),
        logprobs=np.zeros(len(turn.ids), "<f4").tobytes(),
        spans=[(0, len(turn.ids), 0)],
        temperature=1.0,
        top_p=1.0,
        finish_reason=turn.finish_reason,
        plain=True,
        choices=1,
        message=msgspec.json.encode(turn.message),
        text=text,
        malformed=turn.malformed,
    )


def app() -> Starlette:
    """The application. A turn is kept until it is fetched."""
    kept: dict[str, ServedTokens] = {}
    renderer = dialect()[0]

    async def chat(http: Request) -> Response:
        body = msgspec.json.decode(await http.body())
        answer, name = drawn(body["seed"]), http.headers.get(TURN_HEADER, "")
        if name:
            prompt = np.array(renderer.prompt(read("chat", body, strict=False)), "<i4")
            kept[name] = msgspec.structs.replace(answer, prompt_ids=prompt.tobytes())
        choice = {"index": 0, "message": msgspec.Raw(answer.message), "finish_reason": answer.finish_reason}
        head = {"id": f"chatcmpl-{name}", "object": "chat.completion", "created": 0, "model": "policy"}
        return Response(msgspec.json.encode(head | {"choices": [choice]}), media_type="application/json")

    async def turn(http: Request) -> Response:
        tokens = kept.pop(http.path_params["name"], None)
        return Response(msgspec.msgpack.encode(tokens), 200 if tokens else 404, media_type=MSGPACK)

    return keeping_server(chat, turn)


def main(argv: list[str]) -> None:
    """Serves until a signal comes."""
    with open_listener("127.0.0.1", 0, LOOPBACK) as listener:
        run_server(uvicorn.Server(server_config(app())), listener, "policy", Path(argv[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
