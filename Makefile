PYTHON ?= python3
SEED ?= 1
BIN = .venv/bin

.PHONY: setup demo test test-slow lint bench

setup: .venv/ready

# CPU-only PyTorch is tried first from wheels that pip finds locally or on the configured index; see README for GPUs.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch .venv/ready

demo: setup
	$(BIN)/etude demo --seed $(SEED)

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not gpu"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: setup
	$(BIN)/etude bench engine --json
	$(BIN)/etude bench sandbox --json
