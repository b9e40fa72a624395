# `make help` lists the targets. Each target runs the set-up first, which takes no time once it is done.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
# The service's address for `make serve`.
HOST ?= 127.0.0.1
PORT ?= 8700
# Further arguments for the program that a target runs: make test ARGS="-k acquire"
ARGS ?=
# How many tests `make test` runs side by side; 0 runs them one after another. The default is one per processor core. One more is a fifth faster, because
# tests wait for a quarter of their time, and leaves less room for those that measure time.
WORKERS ?= $(shell nproc)
# How many of the slowest tests pytest lists at the end.
SLOWEST ?= 20

AGENT := sandbox_server/agent
# Functions newer than Python 3.8. The agent uses them only where the interpreter has them.
NEWER_FUNCTIONS := os.pidfd_open signal.pidfd_send_signal

.PHONY: help setup demo demo-rl demo-train test check pytest serve bench faults soak matrix picture format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: ## create the virtual environment .venv; install bubblewrap and tmux
	@PYTHON='$(PYTHON)' .ci/setup

demo: setup ## acquire 8 slots, upload a project with a failing test into each, fix it and run its tests
	@$(BIN)/python -m env_client.demo

demo-rl: setup ## roll out a group on a repository with a bug, with a scripted model: chat completions, then tokens of vLLM
	@$(BIN)/python -m environments.demo

demo-train: setup ## train a small model with GRPO in the slots of an embedded service: make demo-train ARGS="--steps 12"
	@$(BIN)/python -m environments.demo.small_trainer $(ARGS)

test: check ## run the static checks, then every test, side by side: make test ARGS="-k acquire" WORKERS=4
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder --durations $(SLOWEST) $(ARGS)

check: setup ## run the static checks: style, types, import directions, Python 3.8 for the agent
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python .ci/check_agent_python.py
	@$(BIN)/vermin --quiet --no-tips --violations --target=3.8- $(addprefix --exclude ,$(NEWER_FUNCTIONS)) $(AGENT)

pytest: setup ## run tests without the static checks, one after another: make pytest ARGS=tests/unit
	@$(BIN)/python -m pytest $(ARGS)

serve: setup ## run the service until Ctrl-C
	@exec $(BIN)/python -m sandbox_server serve --host $(HOST) --port $(PORT)

bench: setup ## compare the service with the bare machine and SWE-ReX; write the speed table of the README, or measure some parts: make bench ARGS=fresh
	@$(BIN)/python -m tests.bench $(if $(ARGS),$(ARGS),--write)

faults: setup ## run the crash harness, load and failures at once: make faults ARGS="--seconds 600 --clients 50"
	@.ci/setup-faults
	@$(BIN)/python -m tests.faults $(ARGS)

soak: setup ## check that nothing grows over many leases: make soak ARGS="--cycles 10000 --isolation uid-root"
	@$(BIN)/python -m tests.bench.soak $(ARGS)

matrix: setup ## run the hostile suite and write the isolation table of the README
	@$(BIN)/python -m pytest tests/hostile --readme=write

picture: setup ## record a session in the terminal of a slot, and write its last screen into docs/terminal.svg
	@$(BIN)/python .ci/terminal_picture.py

format: setup ## format the code with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## delete everything that make created here
	@rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
