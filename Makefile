# `make demo` and `make test` do all of their set-up in .venv; run them again and only what changed is done again.
SHELL := /bin/sh
PYTHON ?= python3
TORCH ?=
URL ?=
VENV := .venv
BIN := $(VENV)/bin
DEMO := .demo
# As many processes as tests/conftest.py finds right for this machine; one that has nothing left to do takes from another.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
# The extras of pyproject.toml say what a target needs, and constraints.txt in which versions.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOAK_S ?= 3600
QUICK ?=
# What benchmarks compare with and nothing else needs, in an environment of its own that sees all of $(VENV).
PEERS := .peers
PEER_PACKAGES := torchft==0.2.0 deepspeed mosaicml-streaming

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-more nightly night try soak gpu-check check needs clusters format docs figures notebook data dist clean

help:
	@echo "make demo    train on 1, 2 and 4 workers of this machine and compare the bits"
	@echo "make test    all checks, and the tests that need no more than this and do not take long"
	@echo "make test-more  the tests that need more of the system (hosts on one machine: root; Slurm, MPI, Ray; a browser), other packages, or more time"
	@echo "make nightly all patterns, and every strategy with every fault: in full what the two above run a part of"
	@echo "make night   every benchmark of the documentation, for hours and on a machine left alone; QUICK=1: half an hour"
	@echo "make try PYTHON=python3.12 TORCH=2.9.1  the tests that depend on the versions of Python and torch, in an environment with these"
	@echo "make soak    faults at random for SOAK_S=$(SOAK_S) seconds"
	@echo "make gpu-check  on a machine with GPUs: what has to be tried there, and one report to send back"
	@echo "make check   the checks only: ruff and mypy"
	@echo "make format  let ruff put the code in order"
	@echo "make docs    build the site of the documentation into ./site"
	@echo "make figures   write the tables of the documentation from the newest results, draw its figures, list its pages for programs"
	@echo "make notebook  execute the notebook of the documentation again"
	@echo "make data    fetch the data of the larger examples into ./data"
	@echo "make dist    build the wheel and the source distribution into ./dist; URL=https://... is the project's address, for an index"
	@echo "make clean   remove everything that was made here"

demo: $(VENV)/.demo-installed
	$(BIN)/python examples/demo.py --directory $(DEMO)

test: check
	$(PYTEST) -m "not more"

test-more: clusters
	$(PYTEST) -m more

# What has a part says so: it imports the question whether all is to run.
nightly: clusters
	UNISONO_TEST_ALL=1 $(PYTEST) $$(grep -rl --include='test_*.py' '^from tests.parts import' tests)

night: needs $(PEERS)/.installed
	PATH="$(CURDIR)/$(PEERS)/bin:$$PATH" $(PEERS)/bin/python -m benchmarks.night $(if $(QUICK),--quick)

try:
	tests/try.sh "$(PYTHON)" "$(TORCH)"

# One training after the other to whoever is free: so they run side by side.
soak: $(VENV)/.test-installed
	UNISONO_SOAK_S=$(SOAK_S) $(BIN)/python -m pytest -n auto --dist load --maxschedchunk 1 tests/workers/test_soak.py

gpu-check: $(VENV)/.test-installed
	$(BIN)/python -m benchmarks.gpu

needs:
	@tests/needs.sh

clusters: $(VENV)/.test-more-installed needs

check: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --clean

figures: $(VENV)/.figures-installed
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m website.pictures
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m website.llms

notebook: $(VENV)/.figures-installed
	$(BIN)/python -m website.notebook

data:
	$(PYTHON) examples/fetch_data.py

dist: $(VENV)/.test-installed
	rm -rf dist
	UNISONO_URL="$(URL)" $(BIN)/python -m hatchling build -d dist

clean:
	rm -rf $(VENV) $(PEERS) .try $(DEMO) dist build site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Unisono needs Python 3.11 or newer, and $(PYTHON) is %d.%d; say make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# A stamp is newer than what it stands for, or the installation is done again.
$(VENV)/.demo-installed: $(BIN)/python constraints.txt pyproject.toml hatch_build.py
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[examples]'
	touch $@

$(VENV)/.%-installed: $(VENV)/.demo-installed
	$(PIP) --no-build-isolation --editable '.[$*]'
	touch $@

# A peer that cannot be installed takes no part; its result says what pip said.
$(PEERS)/.installed: $(VENV)/.test-more-installed
	$(BIN)/python -m venv $(PEERS)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/all-of-the-other.pth"
	for package in setuptools wheel $(PEER_PACKAGES); do \
		$(PEERS)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --no-build-isolation \
			"$$package" > "$(PEERS)/$${package%%=*}.log" 2>&1 || echo "not installed: $$package"; \
	done
	touch $@

$(VENV)/.test-more-installed $(VENV)/.docs-installed: $(VENV)/.test-installed
$(VENV)/.test-more-installed: $(VENV)/.docs-installed
$(VENV)/.figures-installed: $(VENV)/.docs-installed
