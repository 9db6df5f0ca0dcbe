"""A small world around a live loop, on a clock of its own: users whose turns and counters appear as time passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import sqlalchemy as sa

from etude.config import LiveConfig, validate
from etude.live.log import journal, schema
from etude.live.log.accounts import seal
from etude.live.release.operations import ReleaseSite
from tests.helpers.followers import Follower
from tests.helpers.live_story import BASE, Story, StoryLog, content
from tests.helpers.live_windows import Loop, answered, new_loop
from tests.helpers.mixtures import widened

HOUR = 3600.0
OPTIONS = {
    "labels": {"least_batch": 4},
    "canary": {"stages": [0.5, 1.0], "minutes": 0.0, "least": 4, "holdback": 0.0},
    "loop": {"hours": 6.0},
}


class World:
    """A loop of one cluster whose servers follow their stores; `seconds` have passed since it began."""

    def __init__(self, root: Path, more: str = "", **options: object) -> None:
        self.loop = new_loop(root, deterministic=True, more=more)
        self.control, self.canary = Follower(root / "control"), Follower(root / "canary")
        self.canary.store.mkdir()
        cluster = {
            "name": "one", "urls": [self.control.url], "store": str(self.control.store),
            "canary_urls": [self.canary.url], "canary_store": str(self.canary.store),
        }  # fmt: skip
        self.options = {
            "folder": self.loop.config.folder, "train": self.loop.config.train, "clusters": [cluster],
            **OPTIONS, **options,
        }  # fmt: skip
        suite = widened(root / "suite" / "tiny", 12)
        self.options["gate"] = {"suites": [str(suite)], "margin": 0.8} | self.options.get("gate", {})
        config = validate(LiveConfig, self.options, "test")
        self.loop = Loop(config, self.loop.log, self.loop.model)
        self.site = ReleaseSite(config, self.loop.log)
        self.seconds, self._batches = 0.0, 0
        self._story, self._log = Story(), StoryLog(Path(config.folder), str(self.loop.log.url))

    def now(self) -> int:
        """Nanoseconds since the epoch."""
        return BASE + round(self.seconds * 1e9)

    def ask(self, count: int) -> None:
        """So many turns of what the control serves, half of whose edits live on; they happened two hours ago."""
        self._batches += 1
        story, at = self._story, self.seconds - 2 * HOUR
        samples = answered(self.loop, 1_000_000 + self._batches, count)
        with self.loop.log.begin() as connection:
            connection.execute(sa.delete(schema.windows).where(schema.windows.c.number > 1_000_000))
        for i, sample in enumerate(samples):
            name = f"s{self._batches}-{i}"
            fields = {"manifest": sample.manifest, "spans": sample.spans, "cluster": "one", "sampled_tokens": 8}
            story.turn(name, sample.turn, at + i, **fields)
            story.edit(sample.turn, f"edit {name}", at + i)
            story.survived(f"edit {name}", float(i % 2), at + i + 1800)
        self._log.write(story)
        sessions = {session.id: session.account for session in story.sessions}
        turns = {turn.id: turn for turn in story.turns}
        keys = self._log.contents.keys(sessions.values())
        for sample in samples:
            turn = turns[sample.turn]
            made = msgspec.structs.replace(
                content(f"fix the {turn.id}", sample.ids), prompt_ids=sample.prompt_ids, logprobs=sample.logprobs
            )
            key = keys[sessions[turn.session]]
            assert key is not None
            assert turn.blob is not None
            self._log.store.put(turn.blob, seal(key, msgspec.msgpack.encode(made), turn.blob))

    def use(self, undone: int = 0) -> None:
        """Sixty accounts of each arm use the model for twenty minutes, and their outcomes are known an hour later;
        `undone` of two edits of each account of the canary are."""
        slot = round(self.site.canary.slot_minutes * 60e9)
        first = -(-self.now() // slot)
        log = self.site.read()
        served = {"control": log.current, "canary": log.trial}
        numbers = {arm: 1 if state is None else state.release.number for arm, state in served.items()}
        counts = {"requests": 4, "edits": 2, "labelled": 2, "applied": 2}
        rows = [
            {
                "release": numbers[arm], "arm": arm, "account": f"{arm}{number}", "slot": at, "name": name,
                "tenant": "acme", "count": n, "total": n,
            }
            for arm in ("control", "canary") for number in range(60) for at in (first, first + 1)
            for name, n in (counts | ({"undone": undone} if arm == "canary" else {})).items()
        ]  # fmt: skip
        with self.loop.log.begin() as connection:
            connection.execute(sa.insert(schema.tallies), rows)
        self.seconds += 2 * HOUR

    def close(self) -> None:
        self.control.close()
        self.canary.close()
        self._log.close()
        self.loop.log.dispose()


@contextmanager
def world(root: Path, patch: Callable[..., None], **options: object):
    """A world whose clock is the log's, closed at the end; `patch` is a monkeypatch's `setattr`."""
    with ExitStack() as stack:
        made = World(root, **options)
        stack.callback(made.close)
        patch(journal, "now", made.now)
        yield made
