"""The check of the chat template by its round trip, and what the template makes of tools and thoughts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import jinja2

from etude.errors import UserError
from etude.renderers import ChatRenderer, ChatTemplate, Renderer, renderer_for, thought_tags
from etude.weights.preflight.findings import Finding, ModelFiles
from etude.weights.preflight.special_tokens import AGAIN, TURN, USER

_THOUGHT = "Dummy thought."
_SWITCHES = ("enable_thinking", "thinking", "thinking_mode", "reasoning_effort", "enable_reasoning")


@dataclass(frozen=True)
class Speech:
    """How a model calls tools and thinks: its dialect ("" for none), and sentences about its calls and thoughts."""

    dialect: str = ""
    calls: str = ""
    thoughts: str = ""


def spoken(files: ModelFiles) -> tuple[Speech, list[Finding]]:
    """How a folder's model speaks, by its template's round trip, and what is wrong with the template."""
    trial = _tried(files)
    if trial is None or isinstance(trial, Finding):
        return Speech(), [] if trial is None else [trial]
    renderer, why = trial
    notes = [Finding("tools", "note", why)] if why else []
    if files.template is None or not isinstance(renderer, ChatRenderer):
        return Speech(renderer.dialect), notes
    most = renderer.calls_per_turn
    calls = {None: "any number of calls a turn", 0: "no calls of tools"}.get(most, f"{most} call a turn")
    return Speech(renderer.dialect, calls, _thoughts(files.template)), notes


def _tried(files: ModelFiles) -> tuple[Renderer, str] | Finding | None:
    """The folder's renderer, and the reason why it cannot call tools; or a finding; None where files are unreadable."""
    if files.unreadable:
        return None
    try:
        return renderer_for(files.folder), ""
    except UserError as e:
        why = str(e)
    if files.template is None:
        text = "there is no chat template (a base model): sft, apply and rl need one (--chat-template)"
        return Finding("template", "note", text)
    try:
        return renderer_for(files.folder, tools=False), why
    except UserError as e:
        return Finding("template", "fault", str(e), files.edits_of_bundled())


def _thoughts(template: ChatTemplate) -> str:
    """A sentence on the template's thoughts."""
    opening, closing = thought_tags(template)
    if closing not in template.source:
        return "none"
    switch = next((name for name in _SWITCHES if name in template.variables), None)
    off = "that no variable turns off" if switch is None else f"that {switch} changes"
    turn = {"role": "assistant", "content": TURN, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    held = {"of the last turn": [USER, turn], "of former turns": [USER, turn, AGAIN]}
    dropped: list[str] = []
    for which, messages in held.items():
        with suppress(jinja2.TemplateError):
            dropped += [] if _THOUGHT in template.render(messages, generate=False) else [which]
    kept = f"; the template drops those {' and '.join(dropped)}, and episodes keep them" if dropped else ""
    return f"between {opening} and {closing}, {off}{kept}"
