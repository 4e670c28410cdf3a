# Two commands do everything on a fresh machine with Python 3.11+ and a C++ compiler:
#   make repro   the environment, the whole pipeline, and where the report is
#   make test    the environment and the tests
#   make repro JOBS=4   four cells at a time
#   make bench   what this machine can do, best with nothing else running; BENCH="--models nano" for less

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 1
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help repro bench test test-slow env lint clean

help:
	@sed -n 's/^#   //p' Makefile

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v >= (3, 11) else f"error: Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; name another with make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/python -m altgrad.reporting.offline >/dev/null
	touch $(STAMP)

# Without git history DVC needs to be told so; experiments and comparisons of revisions need git.
repro: env
	@git rev-parse --git-dir >/dev/null 2>&1 || dvc config --local core.no_scm true
	@python -m altgrad.config
	@dvc repro --quiet grid
	@test "$(JOBS)" = 1 || python -m altgrad.workers --jobs "$(JOBS)"
	dvc repro
	@echo "The report: $(CURDIR)/reports/index.html"

# The report shows the record when there is one to write it into.
bench: env
	python -m altgrad.benchmark $(BENCH)
	@test ! -d data/diag || dvc repro --quiet --single-item report

test: env
	python -m pytest -n auto --dist loadscope -m "not slow"

test-slow: env
	python -m pytest -n auto --dist loadscope -m slow

lint: env
	ruff check .

clean:
	rm -rf scratch
