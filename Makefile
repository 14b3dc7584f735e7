# Every target sets up .venv first, once: the stamp is younger than pyproject.toml until that changes. `make train`
# installs what jobs need, other targets also what tests and checks need.
# make train ARGS="--train.steps 50"     arguments are passed on
# make train NPROC=4                     ranks; default: every local GPU, or 2 on the CPU
# make test                              what a change must pass, in about 15 minutes on two cores
# make test  ARGS="-k prefetch -x"       arguments of pytest; files that they name run whole
# make test-all                          every test
# make quick                             the pure tests and the central ones on two ranks, in under a minute
# make guard ARGS="tests/engine"         tests under an allocator that catches use of freed memory; needs a C compiler
# make house                             code lines by room, import circles, the largest classes and files, shares of tests
# make defects ARGS="ledger"             breaks a copy of the engine in known ways and shows which test finds each
# make defects ARGS="streams"            takes waits away, and shows what both simulators of an accelerator see
# make faults                            kills jobs of 1 to 4 ranks in 220 ways and checks that nothing is lost; 16 minutes
# make ops                               every operation of torch's table with sharded parameters, in under 40 minutes
# make clusters                          jobs on hosts made of namespaces, under SLURM and Ray; skips what is missing
# make gpu                               the device path on a GPU, in three minutes; ARGS="--device cpu" tries it without
# make bench-gpu                         time, MFU and memory of steps on a GPU beside FSDP2, in nine minutes; installs nothing
# make bench                             every engine's step beside FSDP2's on two CPU ranks, in under 20 minutes
# make bench ARGS="--shapes deep --only FSDP"   fewer; benchmarks/README.md says how to add DeepSpeed and Megatron-FSDP
# make docs                              the documentation as a site, in build/site; with search: make docs-serve
# make test  WORKERS=0                   in one process; default: 3, each with a part of the files and ranks of its own

SHELL := /bin/sh
PY := .venv/bin/python
STAMP := .venv/.set-up
TRAIN_STAMP := .venv/.set-up-train
DOCS_STAMP := .venv/.set-up-docs
CONFIG ?= examples/llama_debug.toml
NPROC ?= $(shell $(PY) -c "import torch; print(torch.cuda.device_count() or 2)")
WORKERS ?= 3
ARGS ?=

.PHONY: setup train test test-all quick guard house defects faults ops clusters gpu bench-gpu bench docs docs-serve check lint types contract format clean

setup: $(STAMP)

$(STAMP): pyproject.toml tools/setup.sh tools/environment.py
	@PYTHON="$(PYTHON)" sh tools/setup.sh dev
	@touch $@

$(TRAIN_STAMP): pyproject.toml tools/setup.sh tools/environment.py
	@PYTHON="$(PYTHON)" sh tools/setup.sh train
	@touch $@

$(DOCS_STAMP): pyproject.toml tools/setup.sh tools/environment.py
	@PYTHON="$(PYTHON)" sh tools/setup.sh docs
	@touch $@

train: $(TRAIN_STAMP)
	.venv/bin/shardwright train $(CONFIG) --nproc $(NPROC) $(ARGS)
	@echo "shardwright is .venv/bin/shardwright here; docs/tutorial.md and docs/can_i.md go on from this run"

# Each rank is a process that imports the tests and the package. Python compiles them once, not in each rank.
# A test that takes ten minutes is stuck: it fails, and the others go on.
LIMIT := --timeout 600
TESTING := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(LIMIT)

test: $(STAMP)
	$(TESTING) $(ARGS)

test-all: $(STAMP)
	$(TESTING) --tier all $(ARGS)

# What a change to the engine breaks first: pure tests of layout and memory, and short ones of training on two ranks.
QUICK ?= tests/engine/layout tests/engine/memory tests/checkpoint/dcp/test_metadata.py tests/engine/test_behaviour.py \
	tests/engine/test_selected.py tests/engine/test_unused.py tests/engine/test_aliases.py tests/engine/test_frozen.py \
	tests/engine/test_states.py

quick: $(STAMP)
	$(TESTING) --tier change -k "not 3ranks and not 4ranks" $(QUICK) $(ARGS)

guard: $(STAMP)
	PY=$(PY) sh tools/guard.sh $(ARGS)

house: $(STAMP)
	$(PY) tools/house.py $(ARGS)
	@$(PY) tools/test_shares.py

defects: $(STAMP)
	$(PY) -m tests.defects $(ARGS)

faults: $(STAMP)
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(PY) -m tools.faults --table benchmarks/results/faults.txt $(ARGS)

# ARGS="--ops 'nn.functional.*' --layouts per_parameter" runs a part; --help has the other options.
ops: $(STAMP)
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(PY) -W ignore -m tests.engine.operations $(ARGS)

# Hosts made of namespaces, and a SLURM cluster on them, where that is possible; a Ray cluster with the extra ray.
clusters: $(STAMP)
	SHARDWRIGHT_TEST_CLUSTERS=1 PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest tests/train/rank/test_hosts.py \
		tests/train/launch/test_relay.py tests/train/launch/test_slurm.py tests/integrations/test_ray.py $(ARGS)

# With any Python that has torch: a machine with a GPU may have no network to make .venv from. The first one whose torch
# serves GPUs, or else .venv, if there is one.
ANY_PYTHON = $$(for each in $(PY) "$${PYTHON:-python3}"; do "$$each" -c "import sys, torch; \
	sys.exit(not (torch.version.cuda or torch.version.hip))" 2>/dev/null && echo "$$each" && exit; done; \
	[ -x $(PY) ] && echo $(PY) || echo "$${PYTHON:-python3}")

gpu:
	@"$(ANY_PYTHON)" tools/gpu.py $(ARGS)

bench-gpu:
	@"$(ANY_PYTHON)" benchmarks/gpu.py $(ARGS)

bench: $(STAMP)
	PYTHONPATH=src $(PY) -m benchmarks.peers $(ARGS)

# The variable silences an advertisement of the theme for another program.
docs-serve: docs
	$(PY) -m http.server -d build/site -b 127.0.0.1 8000

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)

check: lint types contract

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)
	$(PY) -m mypy

contract: $(STAMP)
	.venv/bin/lint-imports

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
