"""A chat template in place of the model's own: where it comes from, and what is said of one that does not fit."""

import json
import shutil
from pathlib import Path

import pytest

from etude.config import RLConfig
from etude.errors import UserError
from etude.harness.loop import Toolset
from etude.harness.prompts import check_context
from etude.renderers import dialect_verdict, renderer_for, say_dropped
from etude.renderers.template import with_chat_template
from etude.trainer.finetune.config import SftConfig
from etude.weights.runs import model_folder, with_models
from tests.helpers.speakers import TEMPLATE, hermes_tokenizer, write_model
from tests.renderers.families import FAMILIES, WITHOUT_TOOLS, Family

# In the manner of SmolLM2: ChatML that knows no tools.
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ALL = (*FAMILIES, *WITHOUT_TOOLS)
ARGUMENTS = {"path": 'a "b"\n', "line": 3, "deep": {"é": [None, True, "</tool_call><|im_end|>"]}}
CALL = {"type": "function", "function": {"name": "read", "arguments": ARGUMENTS}}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_model(tmp_path / "plain", hermes_tokenizer(), PLAIN)


def test_a_model_whose_template_cannot_call_tools_is_told_of_the_bundled_one(plain: Path) -> None:
    with pytest.raises(UserError, match=r"drops .* tool calls; give another with --chat-template chatml-hermes"):
        renderer_for(plain)
    renderer = renderer_for(with_chat_template(plain, "chatml-hermes"))
    assert renderer.dialect == "hermes"
    request = {"role": "user", "content": "Read it."}
    prompt = renderer.text(renderer.prompt([{"role": "system", "content": "Be brief."}, request], [TOOL]))
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nFunctions that you can call")
    assert json.dumps(TOOL) in prompt
    assert prompt.endswith("<|im_start|>user\nRead it.<|im_end|>\n<|im_start|>assistant\n")


def test_what_a_template_drops_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deaf = (
        "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    thinks = TEMPLATE.replace(
        "{%- set said = m.content %}", "{%- set said = (m.reasoning_content or '') + m.content %}"
    )
    for number, (template, dropped) in enumerate((
        (PLAIN, "tools and thoughts"), (deaf, "tools and thoughts"), (strict, "tools and thoughts"),
        (TEMPLATE, "thoughts"), (thinks, ""),
    )):  # fmt: skip
        say_dropped(renderer_for(write_model(tmp_path / f"m{number}", hermes_tokenizer(), template), tools=False))
        said = f"note: the chat template of m{number} drops {dropped}\n" if dropped else ""
        assert capsys.readouterr().err == said
    renderer = renderer_for(tmp_path / "m1", tools=False)
    with pytest.raises(ValueError, match="m1 does not write the text of a message by 'system' in place"):
        renderer.prompt([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}])
    silent = TEMPLATE.replace("messages[0].role == 'system'", "false")
    with pytest.raises(UserError, match="and the chat template of silent does not write the text of a message by 'sys"):
        check_context(renderer_for(write_model(tmp_path / "silent", hermes_tokenizer(), silent)), Toolset(), 9999)
    llama = next(family for family in FAMILIES if family.name == "llama-3.1")
    say_dropped(renderer_for(llama.write(tmp_path / "llama")))
    assert capsys.readouterr().err == "note: the chat template of llama drops thoughts and texts beside calls\n"


def test_twenty_templates_without_tools_are_tried() -> None:
    assert len(WITHOUT_TOOLS) >= 20
    assert {f.name for f in WITHOUT_TOOLS} == {path.stem for path in WITHOUT_TOOLS[0].folder.glob("*.jinja")}
    assert len({f.template for f in WITHOUT_TOOLS}) == len(WITHOUT_TOOLS)
    assert sum(f.chatml for f in WITHOUT_TOOLS) >= 8


@pytest.mark.parametrize("family", WITHOUT_TOOLS, ids=lambda f: f.name)
def test_a_template_without_tools_is_refused_in_a_sentence_that_says_which_to_take(
    family: Family, tmp_path: Path
) -> None:
    said = dialect_verdict(family.write(tmp_path / family.name)).refusal
    assert said.startswith(f"The chat template of {family.name} cannot be used by turns: it ")
    assert family.refusal in said
    assert "\n" not in said
    wanted = "chatml-hermes" if family.chatml else "FILE"
    assert said.endswith(f"; give another with --chat-template {wanted} (model.chat_template), or use another model.")


@pytest.mark.parametrize("family", [f for f in ALL if f.chatml], ids=lambda f: f.name)
def test_the_bundled_template_fits_all_that_mark_turns_as_chatml(family: Family, tmp_path: Path) -> None:
    """Calls come back as they were given, and turns put together are the whole conversation."""
    renderer = renderer_for(with_chat_template(family.write(tmp_path / "model"), "chatml-hermes"))
    assert renderer.dialect == "hermes"
    request, turn = {"role": "user", "content": "Read."}, {"role": "assistant", "content": "", "tool_calls": [CALL] * 2}
    ids = renderer.turn(turn)
    assert ids[-1] in renderer.stop_ids
    assert [(c.name, c.arguments) for c in renderer.parse(ids, "stop", [TOOL]).calls] == [("read", ARGUMENTS)] * 2
    whole = [request, turn, *({"role": "tool", "content": text} for text in ("one", "two")), request]
    together = [*renderer.prompt([request], [TOOL]), *ids, *renderer.bridge(ids, "stop", ["one", "two"], "Read.")]
    assert renderer.text(together) == renderer.text(renderer.prompt(whole, [TOOL]))


@pytest.mark.parametrize("family", [f for f in ALL if "<|im_end|>" not in f.special], ids=lambda f: f.name)
def test_it_is_refused_where_no_token_ends_a_turn_so(family: Family, tmp_path: Path) -> None:
    folder = with_chat_template(family.write(tmp_path / "model"), "chatml-hermes")
    with pytest.raises(UserError, match=r"The chat template of model cannot be used by turns: .*--chat-template FILE"):
        renderer_for(folder)


def test_a_folder_with_another_template_is_the_same_but_for_it(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    made = with_chat_template(plain, str(tmp_path / "mine.jinja"))
    assert made != plain
    assert (made / "chat_template.jinja").read_text() == TEMPLATE
    assert (plain / "chat_template.jinja").read_text() == PLAIN
    others = sorted(p.name for p in plain.iterdir() if p.name != "chat_template.jinja")
    assert all((made / name).samefile(plain / name) for name in others)
    assert sorted(p.name for p in made.iterdir()) == [*sorted([*others, "chat_template.jinja"])]
    times = {path.name: path.lstat().st_mtime_ns for path in made.iterdir()}
    assert with_chat_template(plain, str(tmp_path / "mine.jinja")) == made
    assert {path.name: path.lstat().st_mtime_ns for path in made.iterdir()} == times, "an evaluation knows it again"
    (tmp_path / "mine.jinja").write_text(TEMPLATE + "{# changed #}")
    assert with_chat_template(plain, str(tmp_path / "mine.jinja")) != made
    for given in (tmp_path / "none.jinja", tmp_path):
        with pytest.raises(UserError, match=r"is not a chat template that can be read: give a Jinja file, or the name"):
            with_chat_template(plain, str(given))


def test_a_run_keeps_its_template(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the file; and what the cache has lost is made again, or it is said why not."""
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    given = {"path": str(plain), "chat_template": str(tmp_path / "mine.jinja")}
    for kind in (RLConfig, SftConfig):
        more = {"tasks": {"dataset": "d"}} if kind is RLConfig else {"data": {"files": ["a.jsonl"]}}
        stored = with_models(kind.model_validate({"model": given} | more))
        assert Path(stored.model.origin) == plain
        read = kind.model_validate_json(stored.model_dump_json())
        (tmp_path / "mine.jinja").write_text(PLAIN)
        assert with_models(read) == stored, "a template that is edited later is another run's"
        shutil.rmtree(tmp_path / "cache")
        with pytest.raises(UserError, match=r"is gone from the cache, and .* makes another folder now: put back"):
            with_models(read)
        (tmp_path / "mine.jinja").write_text(TEMPLATE)
        assert with_models(read) == stored
        assert (Path(stored.model.path) / "chat_template.jinja").read_text() == TEMPLATE


def test_a_model_that_is_not_there_is_the_runs_to_refuse(tmp_path: Path) -> None:
    given = {"path": str(tmp_path / "none"), "chat_template": "chatml-hermes"}
    config = RLConfig.model_validate({"model": given, "tasks": {"dataset": "d"}})
    assert with_models(config) == config
    assert not (tmp_path / "cache").exists()


def test_every_entrance_takes_a_template(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    made = model_folder(plain, "mine.jinja")
    model = {"path": str(plain), "chat_template": "mine.jinja"}
    for config in (
        with_models(RLConfig.model_validate({"model": model, "tasks": {"dataset": "d"}})),
        with_models(SftConfig.model_validate({"model": model, "data": {"files": ["a.jsonl"]}})),
    ):
        assert Path(config.model.path).samefile(made)
        assert config.model.chat_template == str(tmp_path / "mine.jinja")
        assert with_models(config) == config
    named = RLConfig.model_validate({"model": model | {"chat_template": "chatml-hermes"}, "tasks": {"dataset": "d"}})
    assert named.model.chat_template == "chatml-hermes", "the name of a bundled one is no path"
