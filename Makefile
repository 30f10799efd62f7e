# Two commands do everything on a fresh machine: `make demo` (the main job) and `make test`.
SHELL := /bin/bash
VENV ?= .venv
GYRE := $(VENV)/bin/gyre
PY := $(VENV)/bin/python

.PHONY: setup demo test chaos harnesses lint format tasks clean

setup:
	@./deploy/setup.sh

tasks: setup
	@$(GYRE) example tasks

demo: tasks
	@$(GYRE) up examples/minirepo/run.yaml $(ARGS)

test: tasks
	@./deploy/harnesses.sh mini-swe-agent claude-code-latest || echo "make test: the tests of what is missing are skipped"
	@$(PY) -m pytest $(ARGS)

# The harness programs that tests/harnesses runs (`make test` installs two of them); what is missing is skipped.
harnesses: setup
	@./deploy/harnesses.sh $(ARGS)

# Everything, with the tests that take minutes or want a quiet machine (hand-over between engines, real harnesses).
test-all: tasks
	@$(PY) -m pytest -m "slow or not slow" $(ARGS)

# The fault matrix: every part lost at every step of a hand-over and of a join (hours on two cores; ARGS="--only cut").
chaos: tasks
	@$(PY) -m tests.faults.chaos $(ARGS)

lint: setup
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

format: setup
	@$(VENV)/bin/ruff check --fix -q . ; $(VENV)/bin/ruff format -q .

clean:
	rm -rf runs .pytest_cache .ruff_cache .mypy_cache .hypothesis
