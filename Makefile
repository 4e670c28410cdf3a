# Two commands do everything on a fresh machine with Python 3.11+ and a C++ compiler, make repro and make test:
#   make repro                     install the environment, run the pipeline, print the report's path
#     SET='grid.seeds=[0,1,2]'     first change these settings in params.yaml, with spaces between several
#     JOBS=4                       train four runs at a time; default: what is fastest on this machine
#     ENGINE=ray                   train on the Ray cluster that RAY_ADDRESS names, or on a local one
#   make estimate                  estimate time and cost of `make repro` from a few steps of each kind of run
#     SET=... JOBS=4 GPU=h100      with these settings; on that GPU, from its record by `make gpu`
#   make watch                     serve a page, to this machine alone, that follows the runs while they train
#     WATCH='--port 0'             on any free port
#   make study NAME=own-geometry   train what a question of the study lacks, write its page: reports/study/README.md
#   make stability                 find the largest stable learning rate of formats and optimizers: reports/stability
#     VARY='train.warmup=0.0,0.1'  search anew for each of these values; SET and JOBS as above
#   make bench                     measure the speed of this machine, which should be idle: reports/bench
#     BENCH='--only nano'          measure a part
#   make gpu                       measure this machine's GPU in ten minutes, installing nothing; again: continue
#   make simulate                  simulate how often a report claims what is not there, minutes: reports/simulation.csv
#   make injected                  count how often an injected fault is found, minutes: reports/first_anomaly
#   make faults                    kill runs, fill disks, damage files at chosen moments, an hour: reports/faults.md
#   make test                      run the tests of less than fifteen seconds; installs what only tests need
#   make test-long                 run the tests of fifteen seconds and more
#   make test-slow                 run the tests of minutes
#   make test-avx2                 run tests as on a processor without AVX-512 and bf16; TESTS=tests: all tests
#   make test-arm                  compare the bits of the C++ loops, compiled for ARM and emulated; needs Debian's
#                                  g++-aarch64-linux-gnu, qemu-user-static and clang
#   make mutate                    break the package on purpose, a line at a time: does a test notice? Half an hour
#     MUTATE='-j 1 bands'          one at a time, of the entries about bands in tests/mutations/mutations.yaml
#   make golden                    compare a miniature grid's results, to the bit, with those committed; two minutes
#     GOLDEN="'arms/*'"            of some runs; --write: write them; --default DIR: the losses of a default run in DIR
#   make lint                      run ruff over all files, and mypy over the package and the stages
#   make env                       install what `make repro` needs
#   make env-test                  install what the tests need too
#   make clean                     delete scratch/, where interrupted runs have their checkpoints

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

.PHONY: help repro estimate watch study simulate injected stability faults gpu bench test test-long test-avx2 test-arm test-slow golden mutate env env-test lint clean

help:
	@sed -n 's/^#   //p' Makefile

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v >= (3, 11) else f"error: Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; name another with make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	$(BIN)/python -m altgrad.reporting.dvc_outputs >/dev/null
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
	python -m reports.first_anomaly.injected

# SET and VARY change settings for the search alone.
stability: env
	python -m altgrad.stability $(if $(JOBS),--jobs "$(JOBS)") $(if $(SET),-S '$(SET)') \
	$(foreach setting,$(VARY),--vary '$(setting)')

faults: env-test
	python -m reports.faults $(FAULTS)

# With the project's own environment if it is there, else with whatever this machine has: it may be without a network.
# The tests hold GPU and CPU against each other.
gpu: GPU_PYTHON = $(firstword $(wildcard $(BIN)/python) $(PYTHON))
gpu:
	$(GPU_PYTHON) -m altgrad.benchmark --gpu --seconds 370 $(BENCH)
	timeout 200 $(GPU_PYTHON) -m pytest tests/gpu

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

mutate: env-test
	python -m tests.mutations $(MUTATE)

golden: env-test
	@python -m tests.golden $(GOLDEN)

lint: env-test
	ruff check .
	mypy

clean:
	rm -rf scratch
