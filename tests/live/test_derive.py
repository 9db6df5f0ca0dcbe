"""Signals from requests and answers alone, in the three dialects."""

from __future__ import annotations

from typing import Any

import pytest

from etude.live.log.derive import (
    Message,
    MessageCall,
    answer_of,
    asks_for_edit,
    conversation,
    dissatisfied,
    is_valid,
    of_answer,
    of_next,
    own_words,
    schemas_of,
)

# Written after the weights, which were not changed since.
UNHAPPY = (
    "No, that's not what I meant. Use the existing helper.",
    "It still fails with the same error.",
    "why did you delete my tests??",
    "wrong file",
    "undo that please",
    "That doesn't work: TypeError on line 3",
    "I asked for one function, not a class",
    "revert, this breaks the build",
    "you forgot the docstring again",
    "ugh, useless",
    "THIS IS BROKEN",
    "nope. try again",
)
HAPPY = (
    "Thanks! Now add a test for it.",
    "perfect, next: the parser",
    "great, commit it",
    "looks good. also rename the variable",
    "Add logging to the server",
    "works now, thank you",
    "What does the second argument do?",
    "lgtm",
    "Can you explain the loop?",
    "nice. please write the docs as well",
    "yes",
    "Now do the same for the client",
)


def test_followups_are_ranked_by_their_words() -> None:
    """All pairs of an unhappy and a happy message are in the right order but for a few, and 1/2 parts them."""
    bad, good = ([dissatisfied(text) for text in texts] for texts in (UNHAPPY, HAPPY))
    wins = sum((b > g) + 0.5 * (b == g) for b in bad for g in good)
    assert wins / (len(bad) * len(good)) >= 0.9
    assert min(bad) > 0.5 > max(good)
    assert 0.1 < dissatisfied("the parser reads tokens") < 0.2
    assert dissatisfied("```python\nraise ValueError('wrong')\n```") == dissatisfied("")
    same = "Sort the names of the accounts"
    assert dissatisfied(same, same) > dissatisfied(same, "Count the files") + 0.2


CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Fix the loop"}]},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "1", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "a.py"},
    ],
    "tools": [{"type": "function", "function": {"name": "bash", "parameters": {
        "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}],
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Fix the loop"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "bash", "input": {"command": "ls"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "a.py"}]},
    ],
    "tools": [{"name": "bash", "input_schema": CHAT["tools"][0]["function"]["parameters"]}],
}
RESPONSES: dict[str, Any] = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Fix the loop"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "1", "name": "bash", "arguments": '{"command": "ls"}'},
        {"type": "function_call_output", "call_id": "1", "output": "a.py"},
    ],
    "tools": [{"type": "function", "name": "bash", "parameters": CHAT["tools"][0]["function"]["parameters"]}],
}
REQUESTS = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}


@pytest.mark.parametrize("dialect", REQUESTS)
def test_the_dialects_say_the_same(dialect: str) -> None:
    found = conversation(dialect, REQUESTS[dialect])
    assert [said.role for said in found] == ["system", "user", "assistant", "tool"]
    assert [said.text for said in found] == ["Be brief.", "Fix the loop", "", "a.py"]
    assert found[2].calls == (MessageCall("bash", '{"command": "ls"}'),)
    assert schemas_of(REQUESTS[dialect]) == {"bash": CHAT["tools"][0]["function"]["parameters"]}
    answer = answer_of({"content": "Which loop?"})
    assert answer == Message("assistant", "Which loop?")
    assert [s.kind for s in of_answer(found, answer, {})] == ["question"]
    following = [*found, answer, Message("user", "No, the other loop is wrong")]
    followup, answered = of_next(found, answer, following)
    assert (followup.kind, followup.text, answered.kind) == ("followup", "No, the other loop is wrong", "answered")
    assert followup.value > 0.5
    assert of_next(found, answer, [*found, answer, Message("tool", "done")]) == []


def test_what_a_text_model_cannot_read_is_left_out() -> None:
    """Requests go to any upstream: images, tools of the provider, items of other versions, broken ones."""
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    chat = {"messages": [{"role": "developer", "content": [image, {"type": "text", "text": "See"}]}, 3, {"x": 1}]}
    assert conversation("chat", chat | {"tools": [{"type": "web_search"}, 7]}) == [Message("system", "See")]
    assert schemas_of(chat | {"tools": [{"type": "web_search"}, 7, {"name": "a"}]}) == {"a": {"type": "object"}}
    server = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    said = {"role": "assistant", "content": [server, {"type": "text", "text": "Found."}]}
    assert conversation("messages", {"messages": [said]}) == [Message("assistant", "Found.")]
    assert conversation("responses", {"input": [{"type": "web_search_call"}]}) == []
    assert conversation("chat", {}) == conversation("responses", {"input": None}) == []
    assert answer_of({"content": None, "tool_calls": [{"function": 1}]}) == Message("assistant")


def test_retries() -> None:
    before = [Message("user", "Fix the loop")]
    answer = Message("assistant", "Done.")
    assert [(s.kind, s.value) for s in of_next(before, answer, before)] == [("retry", 1.0)]
    other = [Message("user", "Fix the second loop")]
    assert [(s.kind, s.value) for s in of_next(before, answer, other)] == [("retry", 0.5)]
    assert of_next(before, answer, [Message("user", "Hello"), Message("assistant", "Yes"), Message("user", "Go")]) == []


def test_invalid_calls() -> None:
    tools = schemas_of(CHAT)
    assert is_valid(MessageCall("bash", '{"command": "ls"}'), tools)
    for name, arguments in (
        ("bash", "{"),
        ("bash", "[]"),
        ("bash", "{}"),
        ("bash", '{"command": 3}'),
        ("sh", '{"command": "ls"}'),
    ):
        answer = Message("assistant", "", (MessageCall(name, arguments),))
        assert [s.kind for s in of_answer([Message("user", "Go")], answer, tools)] == ["invalid_call"], arguments
    assert is_valid(MessageCall("any", '{"x": 1}'), {})


def test_a_call_that_the_server_could_not_read_is_invalid() -> None:
    """Clients see it as text; it is neither a question nor a missing edit."""
    for text in ("[malformed call bash: not closed]", "May I?", ""):
        answer = answer_of({"content": text}, malformed=1)
        assert [s.kind for s in of_answer([Message("user", "Fix it")], answer, {})] == ["invalid_call"]
    assert [s.kind for s in of_answer([Message("user", "Fix it")], answer_of({"content": "May I?"}), {})] == [
        "question"
    ]


OBSERVED = (
    "<returncode>1</returncode>\n<output>\nerror: that is wrong\n</output>",
    "OBSERVATION:\nTraceback: it still fails",
    "Observation: no such file",
    "[execute_command for 'ls'] Result:\nerror",
    "EXECUTION RESULT of [bash]:\nerror",
    "Exit code: 1\nstderr: wrong",
    "<tool_response>\nno, wrong\n</tool_response>",
    "<system-reminder>\nThe user undid your edit, that is wrong\n</system-reminder>",
    "<environment_details>\n# Errors: it still fails",
    "[tool_result] wrong",
    "",
)


@pytest.mark.parametrize("observed", OBSERVED)
def test_output_of_tools_is_no_word_of_the_user(observed: str) -> None:
    """Agents without native calls send results in the role "user"."""
    before, answer = [Message("user", "Fix the loop")], Message("assistant", "```bash\nls\n```")
    assert of_next(before, answer, [*before, answer, Message("user", observed)]) == []
    assert own_words(Message("user", f"{observed}\n\nThanks")) in ("", "Thanks")
    assert own_words(Message("tool", "wrong")) == ""
    shown = [*before, answer, Message("user", observed)]
    other = Message("user", observed.replace("wrong", "right").replace("error", "fine").replace("fails", "holds"))
    assert of_next(shown, answer, [*before, answer, other])[1:] == [], "another result is no retry"
    assert all(signal.value == 1.0 for signal in of_next(shown, answer, [*before, answer, other])), "but the same is"


def test_the_users_words_beside_output_are_read() -> None:
    before, answer = [Message("user", "Fix the loop")], Message("assistant", "Done.")
    said = "<system-reminder>\nperfect, great\n</system-reminder>\nThat is wrong, undo it"
    (followup,) = of_next(before, answer, [*before, answer, Message("user", said)])
    assert (followup.text, followup.before) == ("That is wrong, undo it", "Fix the loop")
    assert followup.value > 0.5
    assert own_words(Message("user", "a < b and c > d, why?")) == "a < b and c > d, why?"
    assert own_words(Message("user", "Observations are missing in the docs")) == "Observations are missing in the docs"


@pytest.mark.parametrize("place", ["role", "result"])
def test_tool_results_of_each_api_are_none_of_the_users(place: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": "that is wrong"}
    anthropic = [
        {"role": "user", "content": [result, {"type": "text", "text": "<system-reminder>\nno\n</system-reminder>"}]}
    ]
    responses = [{"type": "function_call_output", "call_id": "1", "output": "that is wrong"}]
    chat = [{"role": "tool", "tool_call_id": "1", "content": "that is wrong"}]
    for dialect, key, more in (("messages", "messages", anthropic), ("responses", "input", responses),
                               ("chat", "messages", chat)):  # fmt: skip
        body = REQUESTS[dialect]
        before, answer = conversation(dialect, body), Message("assistant", "Done.")
        said = {"role": "assistant", "content": "Done."}
        if place == "role":
            after = conversation(dialect, {**body, key: [*body[key], said, *more]})
        else:
            after = [*before, answer, *conversation(dialect, {key: more})]
        assert of_next(before, answer, after) == [], dialect


def test_no_edit_where_one_was_asked_for() -> None:
    answer = Message("assistant", "The loop ends one step early.")
    asked = [Message("user", "Could you please fix the loop?")]
    assert [s.kind for s in of_answer(asked, answer, {})] == ["no_edit"]
    assert of_answer([Message("user", "Why does it end?")], answer, {}) == []
    assert of_answer(asked, Message("assistant", "```python\nfor x in y:\n```"), {}) == []
    worked = [*asked, Message("assistant", "", (MessageCall("bash", "{}"),)), Message("tool", "")]
    assert of_answer(worked, answer, {}) == []
    assert asks_for_edit("Hi, can you rename this?")
    assert not asks_for_edit("The fix is good")


def test_a_message_that_begins_politely_for_ever_is_judged_by_its_beginning() -> None:
    """Each courtesy took a copy of the rest: a megabyte of them held all answers up for minutes."""
    assert not asks_for_edit("please " * 150_000 + "fix it")
    assert asks_for_edit("please " * 50 + "fix it")
