"""An episode as an ATIF-v1.8 document: the Agent Trajectory Interchange Format of Harbor, tokens included.

    segment   a user step with the prompt that the model read; copied context if the segment goes on from an earlier one
    turn      an agent step: text, thoughts, calls and their results, token ids and log-probabilities

The first turn of a segment has its whole prompt as token ids, every later one the tokens added since
(`metrics.extra.added_token_ids`), so a segment's tokens up to the last sampled one can be reconstructed.
"""

from collections.abc import Iterator
from typing import Any

from etude.records import Episode, Turn
from etude.renderers import Renderer

Step = dict[str, Any]


def atif_document(episode: Episode, renderer: Renderer, agent: dict[str, Any], session: str) -> dict[str, Any]:
    """The trajectory of an episode. `agent` is ATIF's object of that name; tools that the episode
    brought itself are added to it. `session` names the run."""
    steps = list(_steps(episode, renderer))
    if not steps:
        steps = [{"source": "system", "message": episode.detail or "nothing was sampled"}]
    fields = (
        "task_id",
        "group_id",
        "member",
        "attempt",
        "seed",
        "outcome",
        "stop_reason",
        "reward",
        "passed",
        "detail",
    )
    extra: dict[str, Any] = {name: getattr(episode, name) for name in fields}
    # Prompts are recorded as tokens: only a model with the same tokenizer and template can learn from them.
    extra |= {"metrics": episode.metrics, "renderer": renderer.digest}
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": session,
        "trajectory_id": episode.id,
        "agent": agent | ({"tool_definitions": list(episode.tools)} if episode.tools else {}),
        "steps": [{"step_id": number} | step for number, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_prompt_tokens": sum(start for s in episode.segments for start in s.turn_starts),
            "total_completion_tokens": episode.sampled_tokens,
            "total_steps": len(steps),
        },
        "extra": extra,
    }


def _steps(episode: Episode, renderer: Renderer) -> Iterator[Step]:
    turns = iter(episode.turns)
    for number, segment in enumerate(episode.segments):
        ids_T, _, logprobs_T, versions_T = segment.arrays()
        prompt = renderer.text(ids_T[: segment.prompt_length].tolist())
        yield {"source": "user", "message": prompt} | ({"is_copied_context": True} if number else {})
        before = 0  # end of the turn before
        for start, end in segment.spans():
            sampled, added = ids_T[start:end].tolist(), ids_T[before:start].tolist()
            parsed = renderer.parse(sampled, "stop" if sampled and sampled[-1] in renderer.stop_ids else "length")
            metrics: dict[str, Any] = {
                "prompt_tokens": start,
                "completion_tokens": end - start,
                "completion_token_ids": sampled,
                "logprobs": logprobs_T[start:end].tolist(),
                "extra": {"versions": versions_T[start:end].tolist()} | ({"added_token_ids": added} if before else {}),
            }
            metrics |= {} if before else {"prompt_token_ids": added}
            reasoning = {"reasoning_content": parsed.reasoning} if parsed.reasoning else {}
            yield _agent(next(turns), parsed.text) | {"metrics": metrics} | reasoning
            before = end
    for turn in turns:  # side turns of an outside agent: they are in no segment
        yield _agent(turn, turn.text) | {"extra": {"side_turn": True}}


def _agent(turn: Turn, message: str) -> Step:
    step: Step = {"source": "agent", "message": message, "llm_call_count": 1}
    calls = [
        {"tool_call_id": f"call_{i}", "function_name": call.name, "arguments": call.arguments or {}}
        | ({"extra": {"error": call.error}} if call.arguments is None else {})
        for i, call in enumerate(turn.calls)
    ]
    # An outside agent may answer with other messages than one per call.
    known = len(turn.results) <= len(calls)
    results = [
        {"content": text} | ({"source_call_id": f"call_{i}"} if known else {}) for i, text in enumerate(turn.results)
    ]
    step |= {"tool_calls": calls} if calls else {}
    return step | ({"observation": {"results": results}} if results else {})
