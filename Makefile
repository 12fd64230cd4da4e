# Pageferry: `make up` serves the demo model; see `make help`.

PYTHON  ?= python3
VENV    ?= .venv
PREFILL   ?=
DECODE    ?=
PORT      ?=
MODEL     ?=
REDIS_URL ?=
PEERS     ?=
PEER      ?=
BENCH     ?=
MINUTES   ?= 2
SEED      ?= 1
CHAOS     ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
PACKAGE_FILES := pyproject.toml constraints.txt setup.py $(wildcard kernels/native/*)

# Tests whose processes take all cores; the others run two at a time.
WHOLE_STACKS := tests/chaos tests/compose tests/e2e

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help up test chaos lint types bench interference peers clean

help:
	@echo 'make up     serve a model on this machine; Ctrl-C stops it'
	@echo '            PREFILL=1 DECODE=1 PORT=8000 MODEL=<directory, .gguf or hub id> REDIS_URL='
	@echo 'make test   all tests, with real processes and the demo model'
	@echo 'make chaos  kill, freeze, cut and restart everything under load; MINUTES=$(MINUTES) SEED=$(SEED)'
	@echo 'make lint   formatting and lint rules'
	@echo 'make types  static types'
	@echo 'make bench  Pageferry and every installed peer on the same requests; BENCH="--levels 8"'
	@echo 'make interference  what long prompts do to running streams, here and in a peer'
	@echo 'make peers  install the peers (several GB); PEER=openvino for one, PEERS=<directory>'
	@echo 'make clean  remove $(VENV), builds and caches (not the prepared models)'
	@echo 'PYTHON=python3.12 chooses another interpreter (3.11 or later).'

up: $(VENV)/.installed
	@exec $(BIN)/pageferry up $(if $(PREFILL),--prefill '$(PREFILL)') $(if $(DECODE),--decode '$(DECODE)') \
	  $(if $(PORT),--port '$(PORT)') $(if $(MODEL),--model '$(MODEL)') $(if $(REDIS_URL),--redis-url '$(REDIS_URL)')

test: $(VENV)/.installed-dev
	@$(BIN)/python -m pageferry.kernels.prepare
	@failed=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(addprefix --ignore=,$(WHOLE_STACKS)) || failed=1; \
	$(BIN)/python -m pytest $(WHOLE_STACKS) || failed=1; \
	exit $$failed

chaos: $(VENV)/.installed-dev
	@$(BIN)/python tests/chaos/chaos.py --minutes '$(MINUTES)' --seed '$(SEED)' $(CHAOS)

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff format --check --quiet --diff .
	@$(BIN)/ruff check --quiet .

types: $(VENV)/.installed-dev
	@$(BIN)/mypy

bench: $(VENV)/.installed-bench
	@$(BIN)/python benchmarks/compare.py $(if $(PEERS),--peers '$(PEERS)') $(BENCH)

interference: $(VENV)/.installed-bench
	@$(BIN)/python benchmarks/interference.py $(if $(PEERS),--peers '$(PEERS)') $(BENCH)

peers: $(VENV)/.installed-bench
	@$(BIN)/python benchmarks/install_peers.py $(if $(PEERS),--peers '$(PEERS)') $(PEER)

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

$(VENV)/.installed-bench: $(PACKAGE_FILES) | $(VENV)/bin/python
	@echo 'Installing pageferry and its plotting library into $(VENV) (once; torch is large) ...' >&2
	@$(PIP) install -c constraints.txt -e '.[worker,local,bench]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(PACKAGE_FILES) | $(VENV)/bin/python
	@echo 'Installing pageferry and its development tools into $(VENV) (once; torch is large) ...' >&2
	@$(PIP) install -c constraints.txt -e '.[worker,local,dev]'
	@touch $@ $(VENV)/.installed
