# `make help` lists what there is. Every target sets itself up first; the second time that is quick.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
# The service's address for `make serve`.
HOST ?= 127.0.0.1
PORT ?= 8700
# What `make test` passes on to pytest: make test ARGS="-k acquire"
ARGS ?=
# How many tests `make test` runs side by side; 0: one after another. Most of them wait most of their time.
WORKERS ?= 0

AGENT := sandbox_server/agent
# Newer than 3.8, and used by the agent only where they are there.
WHERE_PRESENT := os.pidfd_open signal.pidfd_send_signal

.PHONY: help setup demo test check pytest serve bench faults soak matrix format clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: ## the virtual environment in .venv, bubblewrap and tmux
	@PYTHON='$(PYTHON)' .ci/setup

demo: setup ## the main job for real: 8 slots, a project with a failing test in each, fixed and tested
	@$(BIN)/python -m env_client.demo

test: check ## every check and every test
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup $(ARGS)

check: setup ## the static checks: style, types, directions of import, the agent's Python 3.8
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python .ci/check_agent_python.py
	@$(BIN)/vermin --quiet --no-tips --violations --target=3.8- $(addprefix --exclude ,$(WHERE_PRESENT)) $(AGENT)

pytest: setup ## the tests alone: make pytest ARGS=tests/unit
	@$(BIN)/python -m pytest $(ARGS)

serve: setup ## the service, until Ctrl-C
	@exec $(BIN)/python -m sandbox_server serve --host $(HOST) --port $(PORT)

bench: setup ## the service beside the bare machine and SWE-ReX; writes the README's speed table
	@$(BIN)/python -m tests.bench --write

faults: setup ## load and crashes at once, the histories checked: make faults ARGS="--seconds 600 --clients 50"
	@.ci/setup-faults
	@$(BIN)/python -m tests.faults $(ARGS)

soak: setup ## many leases one after another, and whether the service and its agent stay as small as they were: make soak ARGS="--cycles 12000"
	@$(BIN)/python -m tests.bench.soak $(ARGS)

matrix: setup ## the README's isolation table, from a run of the hostile suite
	@$(BIN)/python -m pytest tests/hostile --readme=write

format: setup ## let ruff put the code in shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## away with everything that make made here
	@rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
