# Everything here runs in .venv, which is made on first use and again whenever
# pyproject.toml or constraints.txt change. `make PYTHON=python3.11` picks the interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
WORKERS := 3

# Each test starts processes; without compiled files each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test together campaign lint clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## plan for emulated unequal devices, train, and compare with even sharding
	@$(BIN)/python examples/demo.py

# Lint runs beside the tests.  Many of these wait, so there are more workers than cores; those
# that time things come last, alone.
test: $(TOOLS) ## lint and tests
	@$(MAKE) --no-print-directory -j2 lint together
	@$(BIN)/python -m pytest -m alone

together: $(TOOLS)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not alone and not campaign"

campaign: $(TOOLS) ## the cases that `make test` has a sample of
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m campaign

lint: $(TOOLS) ## style, types and import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

clean: ## remove caches and build output (.venv stays)
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# A venv that was left half made (no python3-venv at the time) has a python but no pip.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is too old: shardhet needs Python 3.11. Run make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/pip || \
	    { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing shardhet into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install -q -e '.[plots]' -c constraints.txt
	@touch $@

$(TOOLS): $(INSTALLED)
	@echo "installing the tools of tests into $(VENV)"
	@$(BIN)/python -m pip install -q -e '.[dev]' -c constraints.txt
	@touch $@
