# Two commands do everything on a fresh machine with Python 3.11+ and a C++ compiler:
#   make repro   the environment, the whole pipeline, and where the report is
#   make test    the environment and the tests
#   make lint    ruff's rules over all files, and mypy over what callers use
#   make repro JOBS=4   four cells at a time instead of one for each core or GPU; SET='model=micro grid.seeds=[0,1,2]' changes params.yaml
#   make study JOBS=2   the evidence about the arms, hours; leaves params.yaml changed: reports/study/README.md
#   make tuning   what fixed the learning rates and the decay of the default grid: reports/study
#   make simulate   how often the report's rules claim what is not there, minutes: reports/simulation.csv
#   make bench   what this machine can do, best with nothing else running; BENCH="--models nano" for less

PYTHON ?= python3
VENV ?= .venv
JOBS ?=
SET ?=
KEEP ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help repro study tuning simulate bench test test-slow env lint clean

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
	@python -m altgrad.execution $(if $(JOBS),--jobs "$(JOBS)") $(foreach setting,$(SET),-S '$(setting)')
	@echo "The report: $(CURDIR)/reports/index.html"
	@test -z "$(KEEP)" || { mkdir -p "$(KEEP)/figures" && cp reports/figures/*.png "$(KEEP)/figures" && \
	cp params.yaml reports/REPORT.md reports/metrics.json reports/plots/results.csv "$(KEEP)"; }

MASTER := adamw stiff_update stiff_grad riemann stiff_permuted stiff_matched
ON_GRID := adamw_sr stiff_update_sr rung
comma := ,
list = [$(subst $() $(),$(comma),$(strip $(1)))]
PICO := model=pico tokenizer.vocab_size=1024 train.steps=300 optimizers.rung.lr=2.0 optimizers.stiff_matched.lr=3e-3 \
	$(foreach arm,$(MASTER) $(ON_GRID),optimizers.$(arm).plain_lr=1.2e-2)
FIRST := $(PICO) grid.seeds=[0,1,2]
STUDY := $(FIRST) grid.lr_scales=[0.5,1,2]
EIGHT := E0M7,E1M6,E2M5,E3M4,E4M3,E5M2,E6M1,E7M0
# Other seeds than those that chose the learning rate, for what the first parts found.
OTHER := $(PICO) grid.seeds=[3,4,5,6,7,8,9,10] grid.lr_scales=[1]
AGAIN := $(OTHER) grid.formats=[E2M5,E3M4,E4M3,E5M2] grid.baseline=E4M3
AGAIN_RUNG := $(OTHER) grid.formats=[E1M6,E2M5,E3M4] grid.baseline=E1M6
# The same geometry on weights that nothing rounds to it: a gain in the format beyond that is the format's own.
TWINS = $(1) $(addprefix virtual.,$(1))
VIRTUAL := $(OTHER) grid.baseline=bf16 \
	grid.formats=$(call list,bf16 $(call TWINS,E2M5 E3M4 E4M3 E5M2))
# The format that gained most and the uniform one; at this rate, the best of E3M4, E4M3 is unstable.
VIRTUAL_GRID := $(OTHER) grid.baseline=E1M6 grid.formats=$(call list,$(call TWINS,E1M6 E3M4))
# Where the best rate was the largest or the smallest of three: a wider range, and lower still in the coarsest formats.
STEPS := adamw riemann adamw_sr rung
WIDER := $(FIRST) grid.lr_scales=[0.25,0.5,1,2,4] grid.formats=[E1M6,E2M5,E3M4,E4M3,E5M2]
LOWER := $(FIRST) grid.lr_scales=[0.015625,0.03125,0.0625,0.125,0.25,0.5,1,2] grid.formats=[E6M1,E7M0]

study: env
	$(MAKE) repro KEEP=reports/study/master \
	SET='$(STUDY) grid.formats=[bf16,$(EIGHT)] grid.baseline=bf16 grid.optimizers=$(call list,$(MASTER))'
	$(MAKE) repro KEEP=reports/study/on-grid \
	SET='$(STUDY) grid.formats=[$(EIGHT)] grid.baseline=E4M3 grid.optimizers=$(call list,$(ON_GRID))'
	$(MAKE) repro KEEP=reports/study/again \
	SET='$(AGAIN) grid.optimizers=$(call list,adamw stiff_update stiff_permuted stiff_matched)'
	$(MAKE) repro KEEP=reports/study/wider \
	SET='$(WIDER) grid.baseline=E4M3 grid.optimizers=$(call list,$(STEPS))'
	$(MAKE) repro KEEP=reports/study/lower \
	SET='$(LOWER) grid.baseline=E6M1 grid.optimizers=$(call list,$(STEPS))'
	$(MAKE) repro KEEP=reports/study/rung-again \
	SET='$(AGAIN_RUNG) grid.optimizers=[adamw_sr,rung] optimizers.rung.lr=4.0'
	$(MAKE) repro KEEP=reports/study/virtual \
	SET='$(VIRTUAL) grid.optimizers=[adamw,stiff_update]'
	$(MAKE) repro KEEP=reports/study/virtual-grid \
	SET='$(VIRTUAL_GRID) grid.optimizers=[adamw_sr,rung] optimizers.rung.lr=4.0'

# What fixed the rates and the decay of the default grid, on seeds that it does not have.
TUNING := model=pico grid.seeds=[10,11,12] grid.baseline=E4M3
RATES := $(TUNING) grid.formats=[E4M3,E5M2,E3M4] grid.lr_scales=[0.5,0.7,1,1.4,2] \
	grid.optimizers=[adamw,stiff_matched,permuted_matched] \
	optimizers.stiff_matched.lr=3e-3 optimizers.permuted_matched.lr=3e-3
VARIED = +optimizers.$(1)={base:adamw,lr:3e-3,plain_lr:$(2),decay:$(3)}
PLAIN := $(TUNING) grid.formats=[E4M3,E1M6] grid.lr_scales=[1] \
	$(call VARIED,less_decay,2.4e-2,1e-4) $(call VARIED,more_decay,2.4e-2,1e-3) \
	$(call VARIED,less_plain,1.2e-2,3e-4) $(call VARIED,more_plain,4.8e-2,3e-4) \
	grid.optimizers=[adamw,less_decay,more_decay,less_plain,more_plain]
tuning: env
	$(MAKE) repro KEEP=reports/study/tuning SET='$(RATES)'
	$(MAKE) repro KEEP=reports/study/tuning-plain SET='$(PLAIN)'

simulate: env
	python -m altgrad.reporting.simulate

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
	mypy

clean:
	rm -rf scratch
