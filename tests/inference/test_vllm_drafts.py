"""etude's drafts in a real vLLM server. Needs an environment with vLLM 0.32 (`make vllm`); takes minutes."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import httpx2
from tokenizers import Tokenizer

from etude.edits.edit import Edit
from etude.inference.server.fast_apply import Applier
from etude.inference.vllm import proposer
from etude.renderers import renderer_for
from tests.helpers.vllm_server import MODEL, needs_vllm, serving

SPECULATIVE = {
    "method": "custom_class",
    "model": "etude.inference.vllm.proposer.Proposer",
    "num_speculative_tokens": proposer.LONGEST,
}

OPTIONS = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8"]

pytestmark = needs_vllm


def completed(url: str, prompt: list[int], temperature: float = 0.0) -> list[int]:
    """The ids of a completion of 48 tokens."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 48, "temperature": temperature, "ignore_eos": True,
            "return_token_ids": True, "seed": 1}  # fmt: skip
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def counter(url: str, name: str) -> float:
    text = httpx2.get(f"{url}/metrics", timeout=60, trust_env=False).text
    return sum(float(value) for value in re.findall(rf"^vllm:{name}_total(?:\{{.*\}})? (\S+)$", text, re.M))


def prompts() -> list[list[int]]:
    """Edits, files that begin again, and two equal prompts: what the model repeats it may draft."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    applier = Applier(tokenizer, renderer_for(MODEL))
    rng = random.Random(0)
    made = []
    for _ in range(12):
        lines = [f"def f{rng.randrange(1000)}(x):\n    return x + {rng.randrange(100)}\n" for _ in range(12)]
        sketch = f"# ... existing code ...\n{lines[4]}x = 1\n{lines[5]}# ... existing code ...\n"
        made.append(applier.request(Edit("".join(lines), sketch, "Put in x."), 2048)[0].ids)
        made.append(applier.encoder.encode("".join([*lines, *lines[:2]])))
    return [*made, made[1]]


def answers(url: str, prompt_ids: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda prompt: completed(url, prompt), prompt_ids))


def test_vllm_says_the_same_with_drafts_and_accepts_some(tmp_path):
    prompt_ids = prompts()
    with serving(MODEL, tmp_path / "plain.log", *OPTIONS) as url:
        plain = answers(url, prompt_ids)
    speculative = "--speculative-config", json.dumps(SPECULATIVE)
    with serving(MODEL, tmp_path / "drafts.log", *OPTIONS, *speculative) as url:
        drafted = answers(url, prompt_ids)
        accepted = counter(url, "spec_decode_num_accepted_tokens")
        assert len(completed(url, prompt_ids[1], temperature=1.0)) == 48  # sampled: vLLM's rejection sampler draws
    assert all(len(ids) == 48 for ids in plain)
    # In float32 only draws nearer than rounding could differ; the prompts are fixed, and none of theirs is.
    assert drafted == plain
    assert accepted > 0, (tmp_path / "drafts.log").read_text()[-3000:]
