PYTHON ?= python3
SEED ?= 1
COUNT ?= 60
BIN = .venv/bin
# Pinned apart from requirements/dev.txt, since its CPU and CUDA wheels differ: pip takes the wheel at hand or its index's.
# To use a GPU, install a CUDA build into .venv first.
TORCH = torch==2.13.0
PIP = $(BIN)/python -m pip install --quiet
PYTEST = $(BIN)/python -m pytest
PARALLEL = -n 2 --dist loadfile
WHEELS = $(wildcard outputs/wheels)
GPU_PYTHON ?= 3.12
GPU_PACKAGES ?= cffi cryptography huggingface-hub pycparser safetensors tokenizers transformers zstandard
# Runs what failed once more, alone, and writes what passed then to .ci/flaky.txt.
SUITE = $(BIN)/python -m tests.helpers.suite

.PHONY: setup demo demo-real demo-live check test smoke test-slow gpu gpu-parts gpu-run gpu-wheels vllm live-versions repositories device fuzz lint format bench lock matrix install-check release package agents harbor chaos mutants fleet-clock test-triton

setup: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[train]"
	touch $@

# What tests and lint need, at the versions and with the digests of requirements/dev.txt.
.venv/installed-dev: pyproject.toml requirements/dev.txt
	$(PYTHON) -m venv .venv
	$(PIP) "$(TORCH)"
	$(PIP) --require-hashes --no-deps --requirement requirements/dev.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@ .venv/installed

demo: .venv/installed
	$(BIN)/etude demo --seed $(SEED)

# A pretrained model of 135M parameters: told answers, fine-tuning, RL. WORDS are overrides of recipes/smollm2-rl.toml.
demo-real: .venv/installed
	$(BIN)/etude demo --real --seed $(SEED) $(WORDS)

# Simulated users teach the nano model through gateway, windows, gate and canary. The users ask with OpenAI's library.
demo-live: .venv/installed-dev
	$(BIN)/etude live demo --seed $(SEED)

check: lint test

test: .venv/installed-dev
	$(SUITE) "not slow and not gpu and not release"

# Of the slow tests one per kind of process, server and stage; with `make lint` and `make test` the gate (.ci/run).
smoke: .venv/installed-dev
	$(SUITE) "smoke"

test-slow: .venv/installed-dev .venv/agents/installed
	ETUDE_MINI_SWE_AGENT=$(CURDIR)/.venv/agents $(SUITE) "slow and not gpu and not release"

# What waits for a GPU, a line of outputs/gpu/gpu.jsonl for each step: kernels, trainer and engine in under eight
# minutes, then whole runs in under four. Installs nothing, since the machine may have no network: with .venv if it is
# there, else with what PYTHON has, and with the wheels of outputs/wheels before it, if they are there.
gpu:
	$(MAKE) --keep-going gpu-parts gpu-run

gpu-parts gpu-run:
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu $(@:gpu-%=%) $(WHEELS:%=--wheels %)

# Wheels for a machine whose Python lacks them, or has them too old: GPU_PACKAGES for GPU_PYTHON, at most 64 MiB.
gpu-wheels:
	rm -rf outputs/wheels
	$(PYTHON) -m pip download --quiet --only-binary :all: --no-deps --dest outputs/wheels --python-version $(GPU_PYTHON) \
	  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any $(GPU_PACKAGES)
	@du -sk outputs/wheels | awk '{ printf "%.1f of 64 MiB\n", $$1 / 1024; exit $$1 > 65536 }'

# Thirty public repositories become tasks. CLONES: a folder of clones, OWNER+NAME; what is missing comes from GitHub.
repositories: .venv/installed-dev
	$(BIN)/python -m benchmarks.repositories --clones $(or $(CLONES),outputs/clones) --output outputs/repositories

# Trainer, engine and weights on a stand-in for a GPU, and whether it finds planted device mistakes.
device: .venv/installed-dev
	$(PYTEST) $(PARALLEL) tests/device --ignore tests/device/test_planted.py
	$(PYTEST) -n 2 --dist load tests/device/test_planted.py

# Each server under wrong requests for ten minutes; prints a table.
fuzz: .venv/installed-dev
	ETUDE_FUZZ_SECONDS=600 $(PYTEST) tests/protocol/test_fuzz.py

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --threads 2

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed-dev
	for name in async documents edits engine mismatch sandbox shared-prompt weights; do \
	  $(BIN)/etude bench $$name --json || exit 1; done

# Writes requirements/dev.txt anew: the newest versions that pyproject.toml allows, with digests, without index addresses.
lock:
	$(PYTHON) -m venv .venv/lock
	.venv/lock/bin/python -m pip install --quiet uv
	.venv/lock/bin/uv pip compile --quiet --upgrade --generate-hashes --universal --python-version 3.11 --no-header \
	  --no-emit-index-url --override requirements/without-torch.txt --extra dev -o requirements/dev.txt pyproject.toml

# For a release; the results stand in docs/results.md ------------------------------------------------------------------

release: matrix install-check agents harbor test-triton device vllm
	ETUDE_MINI_SWE_AGENT=$(CURDIR)/.venv/agents HARBOR_PYTHON=$(CURDIR)/.venv/harbor/bin/python $(PYTEST) -m "release and not gpu and not vllm" --ignore tests/device

# The wheel, its digest and the notes of the tagged version, in dist/.
package: .venv/installed-dev
	$(BIN)/python requirements/package.py $(PACKAGE)

matrix:
	$(PYTHON) requirements/matrix.py

# The wheel in new environments, of several Pythons and users, each extra alone; prints a table. PYTHONS= and EXTRAS=
# choose rows.
install-check: .venv/installed-dev
	PYTHONS="$(PYTHONS)" EXTRAS="$(EXTRAS)" $(BIN)/python requirements/installed.py

# An outside agent and clients as they are published; their model library imports mcp and does not ask for it, and wants
# an older openai than the tests.
agents: .venv/agents/installed

.venv/agents/installed: .venv/installed
	$(BIN)/python -m venv .venv/agents
	.venv/agents/bin/python -m pip install --quiet "mini-swe-agent==2.4.6" "litellm==1.110.2" "anthropic==2.14.0" mcp
	touch $@

# Harbor, which reads task folders in a test; it needs a newer Python.
harbor: .venv/harbor/installed

.venv/harbor/installed: .venv/installed
	$(BIN)/python -m venv .venv/uv
	.venv/uv/bin/python -m pip install --quiet uv
	.venv/uv/bin/uv venv --quiet --python 3.12 .venv/harbor
	.venv/uv/bin/uv pip install --quiet --python .venv/harbor harbor==0.25.0
	touch $@

# Whole runs, swaps and drafts on the real vLLM, on the CPU; some 15 minutes, after 2 to 18 for an environment of 3.4 GB.
# ETUDE_VLLM_PYTHON= names the Python of one that is there.
vllm: .venv/installed-dev $(if $(ETUDE_VLLM_PYTHON),,.venv/vllm/installed)
	ETUDE_VLLM_PYTHON=$(or $(ETUDE_VLLM_PYTHON),$(CURDIR)/.venv/vllm/bin/python) $(PYTEST) -m vllm --durations=0 tests

.venv/vllm/installed: requirements/vllm.py
	$(PYTHON) requirements/vllm.py .venv/vllm
	touch $@

# Kills, flipped bytes, restarts of PostgreSQL, full disks and jumping clocks; about five hours, and can be resumed.
chaos: .venv/installed-dev
	$(BIN)/python -m tests.helpers.chaos outputs/chaos --seed $(SEED)

# Many versions that simulated users teach, and whether they stay good; hours, and can be resumed. MODEL=smollm2
# WINDOWS=2 is of a pretrained model, which the command first trains.
live-versions: .venv/installed-dev
	$(BIN)/python -m benchmarks.live_versions --model $(or $(MODEL),nano) $(WINDOWS:%=--windows %)

# Random mistakes in all rooms, and whether the fast suite notices; hours, and can be resumed.
mutants: .venv/installed-dev
	$(BIN)/python -m tests.helpers.mutants outputs/mutants --seed $(SEED) --count $(COUNT)

# The real controller over a thousand simulated engines and 100,000 episodes, on a virtual clock.
fleet-clock: .venv/installed-dev
	$(PYTEST) -s tests/run/test_fleet_clock.py -k thousand

# The GPU kernels in Triton's interpreter, on the host; an installed Triton of a CUDA build of torch is kept.
test-triton: .venv/installed-dev
	$(PIP) triton
	TRITON_INTERPRET=1 $(PYTEST) tests/weights/test_triton_kernels.py
