"""An environment of one's own: reverse a word. Run it with `etude train recipes/environments/reverse_text.toml`.

Tokens hide letters from a language model, so the tool `spell` shows them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from etude import Environment, EnvironmentEpisode, Task


class Word(Task, frozen=True, kw_only=True):
    """A word to be reversed. The model reads the prompt alone."""

    answer: str


class ReverseText(Environment[Word]):
    """Words of `letters`, to be reversed; the reward is the share of letters in the right place."""

    system = "Answer with the reversed word and nothing else."

    def __init__(self, count: int = 200, length: int = 4, letters: str = "abc", seed: int = 0) -> None:
        self.count, self.length, self.letters, self.seed = count, length, letters, seed

    def tasks(self) -> Iterator[Word]:
        generator = random.Random(self.seed)
        for number in range(self.count):
            word = "".join(generator.choices(self.letters, k=self.length))
            yield Word(id=f"reverse-{number}", prompt=f"Reverse: {word}", answer=word[::-1])

    def tools(self, episode: EnvironmentEpisode[Word]) -> list:
        def spell(word: str) -> str:
            """The letters of a word, one by one."""
            episode.state["spelled"] = True
            return " ".join(word)

        return [spell]

    def reward(self, episode: EnvironmentEpisode[Word]) -> dict[str, float]:
        right, answer = episode.task.answer, episode.answer
        places = sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(answer), len(right))
        known = sum(letter in self.letters for letter in answer) / max(len(answer), 1)  # a first step: its letters
        return {"places": 0.8 * places, "letters": 0.2 * known}

    def validate(self, task: Word) -> None:
        parts = self.reward(EnvironmentEpisode(task, answer=task.answer))
        assert abs(sum(parts.values()) - 1.0) < 1e-9, "its own answer does not pass"
