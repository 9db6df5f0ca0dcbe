PYTHON ?= python3
SEED ?= 1
BIN = .venv/bin

.PHONY: setup demo test test-slow test-triton agents lint bench

setup: .venv/installed

# pip takes this torch from wheels at hand or from its index; install a CUDA build into .venv first to use a GPU.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: .venv/installed
	$(BIN)/etude demo --seed $(SEED)

test: .venv/installed-dev
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: .venv/installed-dev
	ETUDE_MINI_SWE_AGENT=$(patsubst %/installed,%,$(wildcard $(CURDIR)/.venv/agents/installed)) \
	  $(BIN)/python -m pytest -m "slow and not gpu"

# An outside agent as it is published, for the slow suite; its model library imports mcp and does not ask for it.
agents: .venv/agents/installed

.venv/agents/installed: .venv/installed
	$(BIN)/python -m venv .venv/agents
	.venv/agents/bin/python -m pip install --quiet "mini-swe-agent==2.4.6" "litellm==1.106.2" mcp
	touch $@

# The GPU kernels in Triton's interpreter, on the host; an installed Triton of a CUDA build of torch is kept.
test-triton: .venv/installed-dev
	$(BIN)/python -m pip install --quiet triton
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/weights/test_triton_kernels.py

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/installed
	$(BIN)/etude bench async --json
	$(BIN)/etude bench documents --json
	$(BIN)/etude bench edits --json
	$(BIN)/etude bench engine --json
	$(BIN)/etude bench mismatch --json
	$(BIN)/etude bench sandbox --json
	$(BIN)/etude bench shared-prompt --json
	$(BIN)/etude bench weights --json
