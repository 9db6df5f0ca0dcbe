"""A whole run whose episodes an outside agent plays: real processes, the bundled model, boxes, a step of training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from etude.records import Episode, decode
from etude.store import open_store
from etude.weights.manifest import newest_manifest

ROOT = Path(__file__).parents[2]
SECONDS = 400

# Shows the function as the nano model has learned to see it, and does what it says.
AGENT = r"""
import json, os, re, urllib.request
task = os.environ["TASK"]
path, first, last = re.search(r"See (.+), lines (\d+) to (\d+)", task).groups()
source = "".join(open(path).readlines()[int(first) - 1 : int(last)])
messages = [{"role": "user", "content": task.split("\n\n")[0] + "\n" + source}]
calls = True
while calls:
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages.append(message)
    calls = message.get("tool_calls", [])
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        text = open(path).read()
        found = text.count(arguments.get("old") or "\0") == 1
        if found:
            open(path, "w").write(text.replace(arguments["old"], arguments["new"]))
        result = "ok" if found or call["function"]["name"] != "edit" else "error: no match"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
"""
CONFIG = f"""
stage = "rl"
name = "run"
model = {{ path = "{ROOT / "models/nano"}" }}
tasks = {{ repository = "unused", dataset = "{ROOT / "tests/tasks/data/tiny"}" }}
rollout = {{ prompts = 2, group = 3, max_in_flight = 6, turns = 3, tokens = 120, context = 512, seconds = 60.0, \
agent = {{ folder = "agent", command = "python3 /opt/agent/talk.py" }} }}
reward = {{ length = {{ weight = 1e-3 }} }}
trainer = {{ steps = 1 }}
eval = {{ max_tasks = 1, samples = 1, after = false }}
"""


@pytest.mark.slow
@pytest.mark.smoke
def test_an_outside_agents_episodes_are_trained_on(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/talk.py").write_text(AGENT)
    (tmp_path / "run.toml").write_text(CONFIG)
    argv = [sys.executable, "-m", "etude.cli.main", "train", "run.toml"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs/run"
    assert newest_manifest(open_store(str(folder / "weights"))).version == 1
    rollouts = open_store(str(folder / "rollouts"))
    keys = [key for key in rollouts.list("") if key.endswith(".msgpack")]
    assert len([key for key in keys if key.startswith("eval-before/")]) == 1
    episodes = [decode(rollouts.get(key), Episode) for key in keys]
    assert len(episodes) >= 7
    for episode in episodes:
        assert episode.stop_reason in ("finished", "turns", "tokens")
        assert (episode.metrics["segments"], episode.metrics["forks"]) == (1, 0)
        refused = episode.stop_reason != "finished"  # the last request, which ends the command
        assert episode.metrics["requests"] == episode.metrics["turns"] + refused
        assert 1 <= episode.sampled_tokens <= 120
        assert episode.segments[0].intact
    (step,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert step["mismatch/tokens"] > 0, "conduct differs, so there is something to train on"
    assert step["mismatch/k2"] < 1e-4, "the trainer computes what the engine computed: float32 on both sides"
