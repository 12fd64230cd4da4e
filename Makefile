# Pageferry: `make up` serves the demo model; see `make help`.

PYTHON  ?= python3
VENV    ?= .venv
PREFILL ?= 1
DECODE  ?= 1
PORT    ?= 8000
MODEL     ?=
REDIS_URL ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
PACKAGE_FILES := pyproject.toml constraints.txt setup.py $(wildcard kernels/native/*)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help up test lint types bench clean

help:
	@echo 'make up     serve a model on this machine; Ctrl-C stops it'
	@echo '            PREFILL=$(PREFILL) DECODE=$(DECODE) PORT=$(PORT) MODEL=<directory, .gguf or hub id> REDIS_URL='
	@echo 'make test   all tests, with real processes and the demo model'
	@echo 'make lint   formatting and lint rules'
	@echo 'make types  static types'
	@echo 'make bench  Pageferry and transformers on the same requests; BENCH="--requests 32"'
	@echo 'make clean  remove $(VENV), builds and caches (not the prepared models)'
	@echo 'PYTHON=python3.12 chooses another interpreter (3.11 or later).'

up: $(VENV)/.installed
	@exec $(BIN)/pageferry up --prefill '$(PREFILL)' --decode '$(DECODE)' --port '$(PORT)' \
	  $(if $(MODEL),--model '$(MODEL)') $(if $(REDIS_URL),--redis-url '$(REDIS_URL)')

test: $(VENV)/.installed-dev
	@$(BIN)/python -m pageferry.kernels.prepare
	@$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff format --check --quiet --diff .
	@$(BIN)/ruff check --quiet .

types: $(VENV)/.installed-dev
	@$(BIN)/mypy

bench: $(VENV)/.installed
	@$(BIN)/python -m pageferry.kernels.prepare
	@$(BIN)/python benchmarks/compare.py $(BENCH)

clean:
	@rm -rf '$(VENV)' build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is missing or older than Python 3.11; choose another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments; install the package python3-venv (Debian, Ubuntu)" >&2; exit 1; }
	@'$(PYTHON)' -m venv '$(VENV)'

$(VENV)/.installed: $(PACKAGE_FILES) | $(VENV)/bin/python
	@echo 'Installing pageferry into $(VENV) (once; torch is large) ...' >&2
	@$(PIP) install -c constraints.txt -e '.[worker,local]'
	@touch $@

$(VENV)/.installed-dev: $(PACKAGE_FILES) | $(VENV)/bin/python
	@echo 'Installing pageferry and its development tools into $(VENV) (once; torch is large) ...' >&2
	@$(PIP) install -c constraints.txt -e '.[worker,local,dev]'
	@touch $@ $(VENV)/.installed
