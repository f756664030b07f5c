# Each target works alone on a machine that has Python 3.11 or newer and make: it creates .venv, installs what
# it needs and does its job. `make run PYTHON=...` picks the interpreter; `make test ARGS="-k name"` passes options.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check

CONFIG ?= serve_config.yaml
ARGS ?=

.DELETE_ON_ERROR:
.PHONY: run install install-dev test test-slow test-gpu lint format clean \
	lint-format lint-ruff lint-types lint-imports lint-spelling

run: install  ## serve on 127.0.0.1:8000 (the embedded checkpoint on CPU unless CONFIG says otherwise)
	@$(BIN)/python -m model.tiny --cache
	@exec $(BIN)/python -m deployment.launch $(CONFIG)

test: install-dev  ## everything that needs neither a GPU nor patience; what CI runs
	$(BIN)/pytest -m "not gpu and not slow" $(ARGS)

test-slow: install-dev
	$(BIN)/pytest -m "slow and not gpu" $(ARGS)

test-gpu: install-dev
	$(BIN)/pytest -m gpu $(ARGS)

# The pre-commit hooks call these same targets.
lint: lint-format lint-ruff lint-types lint-imports lint-spelling  ## the static checks

lint-format: install-dev
	$(BIN)/ruff format --check .

lint-ruff: install-dev
	$(BIN)/ruff check .

lint-types: install-dev
	$(BIN)/mypy

lint-imports: install-dev
	$(BIN)/lint-imports

lint-spelling: install-dev
	$(BIN)/codespell

format: install-dev  ## what lint-format and lint-ruff can mend by themselves
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "hotset needs Python 3.11 or newer; none found. Try make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) --editable '.[test,lint]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
