# Everything runs in .venv, which tools/setup makes on first use and then leaves alone.
# Another interpreter: make PYTHON=python3.13 test

PYTHON ?= python3
SETUP := $(PYTHON) tools/setup
BIN := .venv/bin

# Two workers on one thread each, a file at a time: its tests may share a costly start, such as a launch of processes.
# In the order of tests/conftest.py: the longest first.
# Strict: a fallback or a skipped requirement is an error, not a shrug.
# Bytecode is kept, whatever the shell says: else both workers and every process that tests start compile all sources again.
PYTEST := PYTHONDONTWRITEBYTECODE= RESIDUA_STRICT=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test quick mutants lint types docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' Makefile

setup: ## .venv with everything the tests and the tools need
	@$(SETUP) dev

demo: ## compare designs along depth and along the sequence, offline, in some minutes (installs the core only)
	@$(SETUP) core
	$(BIN)/residua compare --plan recipes/demo.toml --out runs/demo --jobs 2

test: lint types docs ## format, lint, types, docs, then the whole suite
	$(PYTEST)

quick: ## lint and the fast tests: under three minutes
	@$(SETUP) dev
	$(BIN)/ruff check
	$(PYTEST) -m "not slow and not browser and not eval" -q -x tests

mutants: ## deliberate faults that the tests must catch, but those recorded as caught: up to an hour
	@$(SETUP) dev
	$(BIN)/python tools/mutants --jobs 2 --record results/mutants.json

lint: ## ruff: format and rules
	@$(SETUP) dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: ## mypy on src/residua
	@$(SETUP) dev
	$(BIN)/mypy

docs: ## the documentation, warnings are errors, into site/
	@$(SETUP) dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir site
	@touch site/built

clean: ## remove what the tools wrote; .venv and runs/ stay
	rm -rf site artifacts build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
