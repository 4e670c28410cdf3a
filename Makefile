# Two commands do everything on a fresh machine with Python 3.11+ and a C++ compiler:
#   make repro   the environment, the whole pipeline, and where the report is
#   make test    the tests, with what they need besides: oracles, trackers, Ray, a browser's driver
#   make test-long   those of fifteen seconds and more each, which .ci/run runs too; make test-slow: those of minutes
#   make test-avx2   the tests of what is computed, as on a processor with AVX2 and neither AVX-512 nor bf16; TESTS=tests for all
#   make test-arm   the loops in C++ compiled for ARM and emulated have the bits that they have here; Debian's g++-aarch64-linux-gnu, qemu-user-static and clang
#   make lint    ruff's rules over all files, and mypy over the package and the stages
#   make env     what `make repro` needs; make env-test: what the tests need too
#   make repro ENGINE=ray   the cells on a Ray cluster, of RAY_ADDRESS or of this machine
#   make repro JOBS=4   four cells at a time instead of one for each core or GPU; SET='model=micro grid.seeds=[0,1,2]' changes params.yaml
#   make estimate   what `make repro` would take, and cost if budget.price is set, from a few steps of each kind of cell; GPU=h100: on that GPU, as `make gpu` measured it
#   make watch   a page that follows the cells while they train, for this machine alone; WATCH='--port 0' for a free port
#   make study NAME=own-geometry   a question of the study: trains what its table of runs lacks, writes its page; reports/study/README.md
#   make simulate   how often the report's rules claim what is not there, minutes: reports/simulation.csv
#   make injected   how often the first anomalous tensor is the one with an injected fault, minutes: reports/first_anomaly
#   make stability   the largest stable learning rate of each format and arm: reports/stability; VARY='train.warmup=0.0,0.1'
#   make faults   kills, full disks and damaged files at chosen moments, and what came of each, an hour: reports/faults.md
#   make gpu   what the GPU of this machine can do, ten minutes in parts that go on where they stopped; installs nothing
#   make bench   what this machine can do, best with nothing else running; BENCH="--only nano" for less

PYTHON ?= python3
VENV ?= .venv
JOBS ?=
SET ?=
NAME ?=
WATCH ?=
GPU ?=
VARY ?=
TESTS ?= tests/numerics tests/model tests/optim
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := python -m pytest -n auto --dist loadscope --no-loadscope-reorder --max-worker-restart 0
TESTS_STAMP := $(VENV)/.installed-tests
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help repro estimate watch study simulate injected stability faults gpu bench test test-long test-avx2 test-arm test-slow env env-test lint clean

help:
	@sed -n 's/^#   //p' Makefile

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v >= (3, 11) else f"error: Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; name another with make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	$(BIN)/python -m altgrad.reporting.offline >/dev/null
	touch $(STAMP)

env-test: $(TESTS_STAMP)

$(TESTS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $(TESTS_STAMP)

# Without git history DVC needs to be told so; experiments and comparisons of revisions need git.
repro: env
	@git rev-parse --git-dir >/dev/null 2>&1 || dvc config --local core.no_scm true
	@python -m altgrad.execution $(if $(ENGINE),--engine "$(ENGINE)") $(if $(JOBS),--jobs "$(JOBS)") $(if $(SET),-S '$(SET)')

estimate: env
	@python -m altgrad.execution --estimate $(if $(GPU),--gpu '$(GPU)') $(if $(JOBS),--jobs "$(JOBS)") $(if $(SET),-S '$(SET)')

watch: env
	@python -m altgrad.watch $(WATCH)

# NAME=longer-runs trains what that question's experiments lack, in checkouts of their own, and writes its page.
study: env
	python -m altgrad.reporting.study --train $(if $(JOBS),--jobs "$(JOBS)") $(NAME)

simulate: env
	python -m altgrad.reporting.simulate

injected: env
	python -m tests.diagnostics.injected

# SET and VARY change settings for the search alone.
stability: env
	python -m altgrad.stability $(if $(JOBS),--jobs "$(JOBS)") $(if $(SET),-S '$(SET)') \
	$(foreach setting,$(VARY),--vary '$(setting)')

faults: env-test
	python -m tests.faults $(FAULTS)

# With the project's own environment if it is there, else with whatever this machine has: it may be without a network.
gpu:
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m altgrad.benchmark --gpu --seconds 570 $(BENCH)

bench: env
	python -m altgrad.benchmark $(BENCH)

test: env-test
	$(PYTEST) -m "not slow and not long"

test-long: env-test
	$(PYTEST) -m long

# The vectors of torch's kernels and graphs, of its two libraries (gelu is oneDNN's), the instructions of all that is
# compiled, and the dtype of products.
AVX2 = ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	TORCHINDUCTOR_CPP_MARCH=x86-64-v3 ALTGRAD_CPU_BF16=off
test-avx2: env-test
	$(AVX2) $(PYTEST) -m "not slow and not long" $(TESTS)

test-arm: env-test
	python -m tests.arm

test-slow: env-test
	$(PYTEST) -m slow

lint: env-test
	ruff check .
	mypy

clean:
	rm -rf scratch
