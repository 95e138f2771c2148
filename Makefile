# Two commands for a newcomer: `make demo`, `make test`. Each sets up first what it needs; set-up is done once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Tests of real processes wait more than they compute. They passed 20 times in a row, four at a time on two cores.
PURE := $(wildcard tests/unit tests/contract tests/simulation)
REAL := $(wildcard tests/process tests/gpu tests/cli tests/docs)

.PHONY: help setup demo test soak sim bench lint format

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY) ## make .venv with everything that the other targets need

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Perdure needs Python 3.11 or newer; name one with: make setup PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "This Python cannot make a venv; on Debian: apt-get install python3-venv" >&2; exit 2; }
	@# torch comes first: nothing that is installed later may pull in another build.
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[dev,demo]'
	@bash .ci/system-packages
	@touch $@

demo: setup ## train a small GPT while workers and a node are killed (90 s)
	$(BIN)/python examples/demo/run.py

test: setup ## everything but the soak tests
	$(BIN)/python -m pytest -n 2 -m 'not soak' $(PURE)
	$(BIN)/python -m pytest -n 3 -m 'not soak' $(REAL)

soak: setup ## hundreds of faults on real processes, thousands of simulated seeds (long)
	$(BIN)/python -m pytest -m soak --timeout 3600 $(REAL) $(PURE)

sim: setup ## 10 000 seeds through the simulator
	$(BIN)/python -m pytest -m soak --timeout 3600 tests/simulation

bench: setup ## restart times against torchrun, what a step costs, what a checkpoint costs
	$(BIN)/python benchmarks/restart.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/checkpoint.py $(if $(PEERS),--peers $(PEERS))

lint: setup ## format check, ruff, mypy, import contracts, dependencies
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports --no-cache
	$(BIN)/deptry .

format: setup ## write what `make lint` would ask for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
