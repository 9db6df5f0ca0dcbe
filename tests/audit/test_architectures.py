"""The table of architectures: what it says of right models, and that no planted mistake passes in silence."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from etude.audit.architectures import page, table, vllm_column
from etude.audit.architectures.families import _SIZES, FAMILIES, make
from etude.cli.main import main
from etude.errors import UserError
from etude.models import block_attention, experts, support
from etude.models.head import Head, head_of
from etude.models.loading import load_model
from etude.records import Generation
from etude.trainer.rl import execution
from tests.helpers import vllm_server
from tests.helpers.sound_folders import edit
from tests.renderers.families import FAMILIES as TEMPLATES

BY_NAME = {family.name: family for family in FAMILIES}
DOCS = Path(__file__).parents[2] / "docs/models.md"
NANO = Path(__file__).parents[2] / "models/nano"


def doctor(*words):
    """The exit code of `etude doctor model`."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "model", *words])
    return ended.value.code


def states(row):
    return {use: cell.state for use, cell in row.cells.items()}


def test_right_models_are_exact_and_the_others_refused_by_name():
    """An MoE in every use, windows with sinks, and layers with a state."""
    families = [BY_NAME[name] for name in ("Qwen3-MoE, Qwen3-Coder", "gpt-oss", "Qwen3.5")]
    moe, windows, hybrid = table.rows(families)
    everywhere = dict.fromkeys(("rows", "shared prompts", "engine", "replay"), "exact")
    outside = {"vLLM": "not run", "tools": "none"}  # no templates are given
    assert states(moe) == states(windows) == everywhere | outside
    assert states(hybrid) == outside | {"rows": "exact", "shared prompts": "refused", "engine": "refused"} | {
        "replay": "none"
    }
    assert hybrid.cells["engine"].said.endswith('use inference.engine = "vllm"')
    assert table.summary([moe, windows, hybrid]) == {"families": 3, "exact": 2, "refused": 1, "silent": 0}


def test_a_folder_of_ones_own(capsys):
    assert doctor(str(NANO), "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert {use: cell["state"] for use, cell in made["cells"].items()} == dict.fromkeys(table.MEASURED, "exact")
    assert (made["ok"], made["findings"], made["dialect"]) == (True, [], "compact")


def test_a_model_that_does_not_load_is_a_fault(tmp_path, capsys):
    """Headers do not tell which tensors the class wants."""
    folder = shutil.copytree(make(BY_NAME["Qwen3"], tmp_path / "made"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for file in NANO.glob("*token*"):
        shutil.copy(file, folder)
    edit(
        folder,
        "tokenizer.json",
        {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []}},
    )
    assert doctor(str(folder), "--json") == 1
    made = json.loads(capsys.readouterr().out)
    (loading,) = [finding for finding in made["findings"] if finding["name"] == "loading"]
    assert "1 missing keys, e.g. model.layers.1.mlp.up_proj.weight" in loading["sentence"]
    assert "cells" not in made


def test_the_page_takes_the_table_of_families_alone(tmp_path, capsys):
    assert doctor(str(NANO), "--docs", str(DOCS)) == 2
    assert "give no folder with them" in capsys.readouterr().err
    with pytest.raises(UserError, match="has no place for the table"):
        page.write(tmp_path / "none.md", [])


def scaled(find):
    """A relative mistake of 1e-3 in what `find` gives of a model."""

    def plant(model):
        tensor = find(model)
        tensor.data.mul_(1.001)

    return plant


@pytest.fixture
def on_vllm(monkeypatch):
    """A model in a vLLM that answers what transformers computes, with an error of so many nats, or an exception."""

    def cell(folder, wrong):
        model = load_model(folder, dtype=torch.bfloat16)

        def answers(run, place, rows):
            if isinstance(wrong, Exception):
                raise wrong
            assert run.inference.python == "PYTHON"
            before = vllm_column._truth(model, rows)
            vllm_column._move(model)  # as the version in the store
            ids = [list(range(5)) * 2 + [7, 8] for _ in rows]
            whole = vllm_column._truth(model, [np.array([*row, *more]) for row, more in zip(rows, ids, strict=True)])
            ends = [(row[-12:] + wrong).tolist() for row in whole]
            sampled = [
                Generation(ids=i, logprobs=end, versions=[0] * 12, finish_reason="length")
                for i, end in zip(ids, ends, strict=True)
            ]
            return vllm_column._Answers(before, vllm_column._truth(model, rows), sampled)

        monkeypatch.setattr(vllm_column, "_answers", answers)
        return table.examine("nano", folder, ("vLLM",), "PYTHON").cells["vLLM"]

    return cell


def test_vllm_is_exact_wrong_or_refuses(on_vllm, tmp_path):
    folder = make(BY_NAME["Qwen3"], tmp_path)
    right = on_vllm(folder, 0.0)
    assert (right.state, right.error) == ("exact", pytest.approx(0.0, abs=1e-6))
    wrong = on_vllm(folder, 0.3)
    assert (wrong.state, wrong.error) == ("silent", pytest.approx(0.3, abs=1e-6))
    said = UserError(
        "the inference server exited with code 1: ValueError: it has heads of 33; see /tmp/x/inference-0.log"
    )
    assert on_vllm(folder, said) == table.Cell("refused", None, "qwen3 ValueError: it has heads of 33")


def test_the_page_keeps_what_vllm_was_measured_to_do():
    def row(name, cell):
        none = table.Cell("none")
        return table.ModelRow(name, "qwen3", dict.fromkeys(page.COLUMNS, none) | {"vLLM": cell})

    sentence = (
        "qwen3 ValueError: it has heads of 33, and this is said at such a length that a line of the page is too short"
    )
    measured = [row("A", table.Cell("exact", 1e-3)), row("B", table.Cell("refused", None, sentence))]
    absent = [row(name, table.Cell("not run")) for name in "ABC"]
    older = page.markdown(measured)
    kept = page.with_known(absent, older)
    assert [r.cells["vLLM"] for r in kept] == [table.Cell("exact"), measured[1].cells["vLLM"], absent[2].cells["vLLM"]]
    assert page.markdown(kept[:2]) == older
    assert page.with_known(absent, "no table") == absent
    assert page.with_known(measured, page.markdown(absent)) == measured


@vllm_server.on_vllm
def test_a_family_on_the_real_vllm():
    (row,) = table.rows([BY_NAME["Qwen3"]], ["vLLM"], vllm=vllm_server.PYTHON)
    assert row.cells["vLLM"].state == "exact", row


THOUSANDTHS = {
    "embeddings": scaled(lambda model: model.get_input_embeddings().weight),
    "a norm": scaled(lambda model: model.model.layers[0].input_layernorm.weight),
    "the values of a layer": scaled(lambda model: model.model.layers[1].self_attn.v_proj.weight),
    "what a layer's attention adds": scaled(lambda model: model.model.layers[-1].self_attn.o_proj.weight),
    "positions": scaled(lambda model: model.model.rotary_emb.inv_freq),
}


@pytest.mark.parametrize("where", THOUSANDTHS)
def test_a_mistake_of_a_thousandth_is_no_noise(where):
    examined = table.Examined(NANO)
    assert examined.cell("rows").state == "exact"
    THOUSANDTHS[where](examined.ours)
    assert examined.cell("rows").state == "silent"


def test_the_bound_follows_the_noise_of_the_model(tmp_path):
    """Larger logits have more noise: a constant that fits the one model alarms on the other."""
    bounds = []
    for scale in (1, 4):
        examined = table.Examined(NANO)
        examined.truth(examined.rows)
        examined._theirs.get_output_embeddings().weight.data.mul_(scale)
        bounds.append(examined.limit)
    assert bounds[1] > 2 * bounds[0]


def window_off_by_one(patch):
    right = block_attention.tiles
    patch.setattr(
        block_attention, "tiles", lambda graph, above, window=None: right(graph, above, window and window + 1)
    )


def no_sinks(patch):
    right = block_attention.attend
    patch.setattr(block_attention, "attend", lambda *args, **options: right(*args[:5], **options))


def no_scale_of_logits(patch):
    patch.setattr(execution, "head_of", lambda model: Head(head_of(model).weight_VD))


def state_runs_on_into_the_next_row(patch):
    patch.setitem(support._REFUSED, "shared prompts", set())


def experts_swapped(patch):
    def swapped(module, hidden_TD, index_TK, weight_TK):
        return experts.etude_experts(module, hidden_TD, index_TK, weight_TK.flip(-1))

    patch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, experts.NAME, swapped)


PLANTED = [
    (window_off_by_one, "Mistral, window", "rows"),
    (no_sinks, "gpt-oss", "rows"),
    (no_scale_of_logits, "Granite", "rows"),
    (state_runs_on_into_the_next_row, "LFM2", "shared prompts"),
    (experts_swapped, "Mixtral", "rows"),
]


@pytest.mark.parametrize(("plant", "name", "use"), PLANTED)
def test_a_planted_mistake_is_refused_by_the_trial_and_silent_without_it(plant, name, use, monkeypatch):
    plant(monkeypatch)
    (row,) = table.rows([BY_NAME[name]], [use])
    assert row.cells[use].state == "refused"
    monkeypatch.setattr(support, "trial", lambda *_, **__: "")  # the measuring takes no part in the refusing
    (row,) = table.rows([BY_NAME[name]], [use])
    assert row.cells[use].state == "silent"
    assert table.summary([row])["silent"] == 1


def test_an_error_after_acceptance_is_silent(monkeypatch):
    def failing(*_):
        raise ZeroDivisionError("by surprise")

    monkeypatch.setattr(table.trial, "log_probs", failing)
    monkeypatch.setattr(support, "trial", lambda *_, **__: "")
    (row,) = table.rows([BY_NAME["Qwen3"]], ["rows"])
    assert row.cells["rows"] == table.Cell("silent", None, "ZeroDivisionError: by surprise")


def test_the_page_has_every_family_and_what_configurations_tell():
    """Cheap signs of a stale page; the slow test makes the table again."""
    text = " ".join(DOCS.read_text().split())
    for family in FAMILIES:
        assert f"| {family.name} (`{family.model_type}`) |" in text, f"stale: {page.BEGIN}"
        config = AutoConfig.for_model(family.model_type, **(_SIZES | family.options))
        for use in support.USES:
            said = support.refusal(config, use).removeprefix(family.model_type).strip()
            assert said in text, f"stale: {page.BEGIN}"


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """Folders with the makers' chat templates, and tokenizers with their special tokens."""
    folder = tmp_path_factory.mktemp("templates")
    for family in TEMPLATES:
        family.write(folder / family.name)
    return folder


def test_dialects_of_the_families_own_templates(templates):
    """The column `tools` is what the page says, and what is expected of each template."""
    expected = {family.name: family for family in TEMPLATES}
    text = DOCS.read_text()
    for family in FAMILIES:
        line = next(line for line in text.splitlines() if line.startswith(f"| {family.name} (`"))
        shown = line.rsplit("|", 2)[1].strip()
        if not family.template:
            assert shown == "-"
            continue
        cell = table.tools(templates / family.template)
        if dialect := expected[family.template].dialect:
            assert (cell.state, cell.said, shown) == ("exact", dialect, f"`{dialect}`")
        else:
            assert (cell.state, shown[:4]) == ("refused", "no (")


@pytest.mark.slow
def test_the_whole_table_and_its_page(templates, capsys):
    assert doctor("--json", "--templates", str(templates)) == 0
    *lines, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last.keys() == {"families", "exact", "refused", "silent"}
    assert last["families"] == len(lines) >= 20
    assert last["silent"] == 0
    exact = {use: sum(line["cells"][use]["state"] == "exact" for line in lines) for use in support.USES}
    assert exact["rows"] >= 16
    assert exact["engine"] >= 12
    made = [
        table.ModelRow(line["name"], line["model_type"], {use: table.Cell(**c) for use, c in line["cells"].items()})
        for line in lines
    ]
    shown = DOCS.read_text().partition(page.BEGIN)[2].partition(page.END)[0].strip()
    assert page.markdown(page.with_known(made, shown)) == shown, f"stale: {page.BEGIN}"
    assert torch.is_grad_enabled()
