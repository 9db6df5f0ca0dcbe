"""The delivery of signals from a spool to the gateway: POST /v1/suggestions and /v1/feedback (docs/live.md).

A signal leaves the spool when the gateway has it on its disk, or refuses it for good (an unknown turn, a wrong form),
which is printed on stderr. While the gateway is away, signals wait.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2

from etude.errors import UserError
from etude.live.observe.spool import WatchState

SECONDS = 15.0
"""Deadline of one request."""
_MAX_SIGNALS = 100  # signals of one request
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
UNKNOWN_SECONDS = 600.0
"""The time for which a signal on an unknown turn is sent again: the gateway writes a turn after its answer."""


@dataclass
class Delivery:
    """The delivery to one gateway, with its API key. Raises UserError for a key that the gateway refuses."""

    state: WatchState
    url: str
    key: str
    delivered: int = 0
    refused: int = 0
    _pause: float = 0.0
    _after: float = 0.0  # monotonic; not before that time
    _reported: set[str] = field(default_factory=set[str])  # turns with a line on stderr

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"--gateway {self.url} is no URL like http://host:8100")
        if not self.key:
            raise UserError("the gateway asks for an API key: set ETUDE_API_KEY to one of `etude live key create`")
        self._http = httpx2.Client(timeout=SECONDS, headers={"authorization": f"Bearer {self.key}"})

    def close(self) -> None:
        """Ends the connection."""
        self._http.close()

    def send(self) -> bool:
        """Sends the waiting signals. False if some must wait for the gateway."""
        if time.monotonic() < self._after:
            return False
        while bodies := self.state.waiting(_MAX_SIGNALS):
            try:
                done = self._deliver(bodies)
            except httpx2.HTTPError:
                done = None
            if done is None:
                if not self._pause:
                    print(
                        f"etude live watch: {self.url} takes no signals, or is no gateway; {self.state.count()} "
                        f"wait, and are sent again",
                        file=sys.stderr,
                        flush=True,
                    )
                self._pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, 2 * self._pause))
                self._after = time.monotonic() + self._pause
                return False
            with self.state.step():
                for number in done:
                    self.state.acknowledged(number)
            self._pause = 0.0
            if len(done) < len(bodies):
                self._after = time.monotonic() + FIRST_PAUSE
                return False
        return True

    def send_until(self, seconds: float) -> int:
        """Sends for at most `seconds`; returns the number of signals that still wait."""
        deadline = time.monotonic() + seconds
        while not self.send() and time.monotonic() < deadline:
            time.sleep(max(0.05, min(self._after, deadline) - time.monotonic()))
        return self.state.count()

    def _deliver(self, bodies: list[tuple[int, dict[str, Any]]]) -> list[int] | None:
        """Sends signals; returns the numbers of those that are done. None while the gateway is away."""
        edits = self._suggest([body["suggestion"] for _, body in bodies if "suggestion" in body])
        if edits is None:
            return None
        events = [_event(number, body) for number, body in bodies]
        status, results = self._post("/v1/feedback", events)
        if status in (200, 404) and len(results) == len(events):
            return self._settled(bodies, [str(result.get("status")) for result in results], edits)
        if status == 400 and len(bodies) > 1:  # one of them is refused: each alone
            done = [self._deliver([each]) for each in bodies]
            return None if any(d is None for d in done) else [number for d in done if d for number in d]
        if status == 400:
            self._refuse(bodies[0][1], results)
            return [bodies[0][0]]
        return None

    def _settled(
        self, bodies: list[tuple[int, dict[str, Any]]], statuses: list[str], edits: dict[str, str]
    ) -> list[int] | None:
        done: list[int] = []
        for (number, body), status in zip(bodies, statuses, strict=True):
            waits = edits.get(body["subject"]) == "unknown"
            if status == "unknown" and not waits and body["turn"] != body["subject"]:
                # Edits of a turn without consent are not recorded: only the turn's counters are.
                answer, results = self._post("/v1/feedback", _event(number, body | {"subject": body["turn"]}))
                if answer not in (200, 404):
                    return None
                status = str(results[0].get("status"))
            if status != "unknown":
                self.delivered += 1
            elif time.time() - body["queued"] < UNKNOWN_SECONDS:
                continue
            else:
                self._refuse(body, "the gateway knows no such turn")
            done.append(number)
        return done

    def _suggest(self, suggestions: list[dict[str, Any]]) -> dict[str, str] | None:
        """Sends edits; returns the gateway's status of each by id. None while the gateway is away. The gateway ignores
        repeated edits."""
        by_turn: dict[str, list[dict[str, Any]]] = {}
        for suggestion in suggestions:
            edit = {name: value for name, value in suggestion.items() if name != "turn"}
            by_turn.setdefault(suggestion["turn"], []).append(edit)
        statuses: dict[str, str] = {}
        for turn, edits in by_turn.items():
            status, results = self._post("/v1/suggestions", {"turn": turn, "suggestions": edits})
            if status not in (200, 400, 404):
                return None
            if status == 400 and turn not in self._reported:
                self._reported.add(turn)
                print(f"etude live watch: the gateway refuses edits of {turn}: {results}", file=sys.stderr)
            elif status != 400:
                statuses |= {
                    edit["id"]: str(result.get("status")) for edit, result in zip(edits, results, strict=False)
                }
        return statuses

    def _post(self, path: str, body: Any) -> tuple[int, Any]:
        answer = self._http.post(self.url.rstrip("/") + path, json=body)
        if answer.status_code in (401, 403):
            raise UserError(
                f"the gateway {self.url} refuses the key in ETUDE_API_KEY ({answer.status_code}); nothing "
                f"is lost, {self.state.count()} signals wait"
            )
        try:
            content = answer.json()
        except ValueError:
            return 503, []
        return answer.status_code, content.get("results", content) if isinstance(content, dict) else content

    def _refuse(self, body: dict[str, Any], why: Any) -> None:
        self.refused += 1
        print(f"etude live watch: {body['kind']} of {body['subject']} was refused: {str(why)[:200]}", file=sys.stderr)


def _event(number: int, body: dict[str, Any]) -> dict[str, Any]:
    names = ("value", "source", "observed_at", "confidence", "horizon")
    fields = {name: body[name] for name in names if name in body}
    event = {"response_id": body["subject"], "name": body["kind"], "event_id": body["event"]}
    return event | fields | {"client_sequence": number}
