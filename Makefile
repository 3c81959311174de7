# Two commands to know: `make demo` and `make test`. VENV=path uses an environment of your own.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WORKERS ?= 2
SOURCES := pyproject.toml constraints.txt

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test lint format soak bench clean

help:
	@echo "make demo   set up and train a small language model on the CPU"
	@echo "make test   set up and run the tests"
	@echo "make lint   formatting, lint rules, types, import contracts, house limits"
	@echo "make soak   the full count of every crash campaign (long)"
	@echo "make bench  overhead of log and checkpoints; log and engine beside others; trainer modes"

demo: $(VENV)/.installed
	$(BIN)/perdure train recipes/sort_digits.yaml

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/tidy.py
	$(BIN)/lint-imports
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m soak --timeout 0 $(PYTEST_ARGS)

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/log.py
	$(BIN)/python benchmarks/log_floor.py
	$(BIN)/python benchmarks/replay.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/tier.py
	$(BIN)/python benchmarks/modes.py

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("perdure needs Python 3.11 or newer, this is %s: run make PYTHON=python3.11" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	@echo "installing perdure into $(VENV) (the first time, this downloads PyTorch)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	@echo "installing perdure and its tools into $(VENV)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@ $(VENV)/.installed
