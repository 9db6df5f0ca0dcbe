"""Episodes, turn by turn, as HTML. Tasks and agents wrote all text, so it is escaped and made inert."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from etude.dashboard.text import compact, escape, shorten, signed
from etude.dashboard.view import ShownEpisode
from etude.records import Episode, Outcome, Segment, ToolCall, Turn

_SPECIAL = re.compile(r"<\|[A-Za-z0-9_]+\|>")
_TINTS = 5  # levels of green and of red, see static/page.css
_MAX_TOKENS = 4000  # sampled tokens shown per episode: each is an element of the page
_MAX_TEXT = 20_000  # characters of one prompt, result or argument
_SURPRISE = -2.302585  # log(0.1): less likely tokens are underlined


@dataclass(frozen=True)
class _AnnotatedTokens:
    """The tokens of a segment with their annotations on the page; one entry per token."""

    texts: Sequence[str]
    logprobs_T: np.ndarray
    versions_T: np.ndarray
    advantages_T: np.ndarray | None


def episode_cards(episodes: Sequence[ShownEpisode]) -> str:
    """One card per episode, the first of each stage open. The largest advantage of all has the deepest tint."""
    peaks = [float(np.abs(np.asarray(e.advantage, float)).max(initial=0)) for e in episodes if e.advantage is not None]
    peak = max(peaks, default=0.0)
    seen: set[str] = set()
    cards: list[str] = []
    for shown in episodes:
        cards.append(_card(shown, peak, is_open=shown.stage not in seen))
        seen.add(shown.stage)
    return "".join(cards)


def _card(shown: ShownEpisode, peak: float, is_open: bool) -> str:
    episode = shown.episode
    stage = f'<span class="tag">{escape(shown.stage)}</span>' if shown.stage else ""
    turns = len(episode.turns)
    facts = f"{turns} turn{'' if turns == 1 else 's'} · {episode.sampled_tokens} tokens · {_versions(episode)}"
    return (
        f'<details class="card episode" data-stage="{escape(shown.stage)}" data-passed="{int(episode.passed)}"'
        f'{" open" if is_open else ""}><summary>{_verdict(episode)}<span class="name">{escape(shown.title)}</span>'
        f'<span class="facts">{stage}{_mean_advantage(shown)}<small>{facts}</small></span></summary>'
        f'<div class="body">{_prompt(shown)}{"".join(_turns(shown, peak))}{_ending(episode)}</div></details>'
    )


def _verdict(episode: Episode) -> str:
    if episode.outcome is not Outcome.SCORED:
        return f'<span class="badge warn">{escape(str(episode.outcome))}</span>'
    return '<span class="badge good">passed</span>' if episode.passed else '<span class="badge bad">failed</span>'


def _prompt(shown: ShownEpisode) -> str:
    segments = shown.episode.segments
    if not segments or not shown.token_texts:
        return ""
    text = "".join(shown.token_texts[: segments[0].prompt_length])
    return f'<section class="turn prompt"><h4>Prompt</h4><pre>{_pills(shorten(text, _MAX_TEXT))}</pre></section>'


def _turns(shown: ShownEpisode, peak: float) -> Iterator[str]:
    sampled = list(_sampled_turns(shown))
    room = _MAX_TOKENS
    for number, turn in enumerate(shown.episode.turns):
        tokens = sampled[number] if number < len(sampled) else None
        if tokens is None or len(tokens.texts) > room:
            written = f'<pre class="plain">{_pills(shorten(turn.text, _MAX_TEXT))}</pre>'
        else:
            room -= len(tokens.texts)
            written = f'<pre class="tokens"{_shared(tokens)}>{_spans(tokens, peak)}</pre>'
        versions = "" if tokens is None else f" · {_range(tokens.versions_T)}"
        yield (
            f'<section class="turn"><h4>Turn {number + 1} <small>model {turn.seconds_model:.2f} s · tools '
            f"{turn.seconds_tools:.2f} s{versions}</small></h4>{written}{_calls(turn)}</section>"
        )


def _sampled_turns(shown: ShownEpisode) -> Iterator[_AnnotatedTokens]:
    """The sampled tokens of each turn, in order over all segments."""
    offset = 0
    for segment in shown.episode.segments:
        ids_T, mask_T, logprobs_T, versions_T = segment.arrays()
        texts = shown.token_texts[offset : offset + len(ids_T)]
        advantages_T = _advantages(shown, offset, len(ids_T))
        for start in segment.turn_starts:
            end = _end_of_turn(segment, mask_T, start)
            if len(texts) >= end:
                turn, advantages = slice(start, end), None if advantages_T is None else advantages_T[start:end]
                yield _AnnotatedTokens(texts[turn], logprobs_T[turn], versions_T[turn], advantages)
        offset += len(ids_T)


def _end_of_turn(segment: Segment, mask_T: np.ndarray, start: int) -> int:
    later = [s for s in segment.turn_starts if s > start]
    stop = later[0] if later else len(mask_T)
    unsampled = np.flatnonzero(mask_T[start:stop] == 0)
    return start + int(unsampled[0]) if unsampled.size else stop


def _advantages(shown: ShownEpisode, offset: int, length: int) -> np.ndarray | None:
    if shown.advantage is None:
        return None
    whole = np.asarray(shown.advantage, dtype=float)
    return np.full(length, float(whole)) if whole.ndim == 0 else whole[offset : offset + length]


def _shared(tokens: _AnnotatedTokens) -> str:
    """The attributes of a turn's first token, written once on the tokens' parent; tokens that differ have their own."""
    if not len(tokens.texts):
        return ""
    version = f' data-v="{int(tokens.versions_T[0])}"'
    return version if tokens.advantages_T is None else f'{version} data-a="{signed(float(tokens.advantages_T[0]))}"'


def _spans(tokens: _AnnotatedTokens, peak: float) -> str:
    spans: list[str] = []
    for i, text in enumerate(tokens.texts):
        logprob = float(tokens.logprobs_T[i])
        classes = ["k"]
        extra = ""
        if tokens.advantages_T is not None:
            advantage = float(tokens.advantages_T[i])
            classes += _tint(advantage, peak)
            extra += "" if advantage == tokens.advantages_T[0] else f' data-a="{signed(advantage)}"'
        if tokens.versions_T[i] != tokens.versions_T[0]:
            extra += f' data-v="{int(tokens.versions_T[i])}"'
        if logprob < _SURPRISE:
            classes.append("u")
        if _SPECIAL.fullmatch(text):
            classes.append("sp")
        spans.append(f'<span class="{" ".join(classes)}" data-l="{logprob:.3f}"{extra}>{escape(text)}</span>')
    return "".join(spans)


def _tint(advantage: float, peak: float) -> list[str]:
    if advantage == 0 or peak == 0:
        return []
    level = min(_TINTS, max(1, round(_TINTS * abs(advantage) / peak)))
    return [f"{'p' if advantage > 0 else 'n'}{level}"]


def _calls(turn: Turn) -> str:
    rows: list[str] = []
    for i in range(max(len(turn.calls), len(turn.results))):
        call = _call(turn.calls[i]) if i < len(turn.calls) else ""
        result = f"<pre>{escape(shorten(turn.results[i], _MAX_TEXT))}</pre>" if i < len(turn.results) else ""
        rows.append(f'<li>{call}<div class="result">{result}</div></li>')
    return f'<ol class="calls">{"".join(rows)}</ol>' if rows else ""


def _call(call: ToolCall) -> str:
    name = f"<b>{escape(call.name) or '?'}</b>"
    if call.arguments is None:
        return f'<div class="call">{name} <span class="badge bad">malformed</span> {escape(call.error)}</div>'
    arguments = {key: shorten(str(value), _MAX_TEXT) for key, value in call.arguments.items()}
    if set(arguments) == {"old", "new"}:
        sides = (("del", arguments["old"]), ("ins", arguments["new"]))
        lines = (f"<{tag}>{escape(line) or ' '}</{tag}>" for tag, text in sides for line in text.split("\n"))
        return f'<div class="call">{name}<pre class="diff">{"".join(lines)}</pre></div>'
    written = " ".join(f"<code>{escape(value)}</code>" for value in arguments.values())
    return f'<div class="call">{name} {written}</div>'


def _ending(episode: Episode) -> str:
    facts = {"reward": compact(episode.reward), "outcome": episode.outcome, "stopped by": episode.stop_reason}
    facts |= {name.replace("_", " "): compact(value) for name, value in sorted(episode.metrics.items())}
    spans = "".join(f"<span>{escape(name)} <b>{escape(value)}</b></span>" for name, value in facts.items())
    detail = f'<p class="detail">{escape(shorten(episode.detail, _MAX_TEXT))}</p>' if episode.detail else ""
    ids = f"task {escape(episode.task_id)} · seed {episode.seed} · episode {escape(episode.id)}"
    return (
        f'<section class="turn ending"><h4>Outcome {_verdict(episode)}</h4>{detail}<p class="facts">{spans}</p>'
        f"<p><small>{ids}</small></p></section>"
    )


def _mean_advantage(shown: ShownEpisode) -> str:
    if shown.advantage is None or not np.size(shown.advantage):
        return ""
    mean = float(np.mean(np.asarray(shown.advantage, float)))
    tone = "pos" if mean > 0 else "neg" if mean < 0 else ""
    return f'<span class="adv {tone}">A {signed(mean)}</span>'


def _versions(episode: Episode) -> str:
    sampled = [versions[mask == 1] for _, mask, _, versions in map(Segment.arrays, episode.segments)]
    return _range(np.concatenate(sampled)) if sampled else "nothing sampled"


def _range(versions: np.ndarray) -> str:
    if not versions.size:
        return "nothing sampled"
    low, high = int(versions.min()), int(versions.max())
    return f"weights v{low}" if low == high else f"weights v{low}–v{high}"


def _pills(text: str) -> str:
    """Escaped text with special tokens set apart."""
    parts: list[str] = []
    end = 0
    for match in _SPECIAL.finditer(text):
        parts += [escape(text[end : match.start()]), f'<span class="sp">{escape(match[0])}</span>']
        end = match.end()
    return "".join([*parts, escape(text[end:])])
