# Each target sets up all that it needs in .venv. `make demo` and `make test` are the two to start with.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
RUN := .venv/bin/python
READY := .venv/.ready
RANKS ?= 2
BENCH_ARGS ?=
FUZZ_ARGS ?=
FAULTS_ARGS ?=

# One thread a rank: ranks that share a machine must not fight for its cores.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test check format bench rules fuzz faults clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

setup: $(READY)  ## make .venv with torch, the project and its extras

# torch comes first and alone, so that a build which is already at hand (a CPU wheel, say) is taken,
# and not the one that an open version range would pull in.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no python3 found; say which: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet $(TORCH)
	$(RUN) -m pip install --quiet --editable '.[dev,examples]'
	@touch $@

demo: $(READY)  ## prove the step exact on 2 simulated ranks, then train a small GPT on 2 real ones
	$(RUN) examples/check_exact.py
	$(RUN) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
	    examples/train_gpt.py --steps 300 --out runs/demo

test: $(READY)  ## run the tests, two files at a time
	$(RUN) -m pytest -n 2 --dist loadfile

check: $(READY)  ## lint, formatting, types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY)  ## rewrite the sources in the house format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(READY)  ## time meshstep against DDP, side by side
	$(RUN) -m bench.run $(BENCH_ARGS)

rules: $(READY)  ## run every sharding rule on real shards and print what is covered
	$(RUN) tests/rules_report.py

fuzz: $(READY)  ## compare 2,000 random programs and 500 random plans of models with plain torch, about 20 minutes
	PYTHONPATH=tests:examples $(RUN) tests/fuzz_programs.py $(FUZZ_ARGS)

faults: $(READY)  ## make each kind of fault ten times on real ranks and print what came of it, about 20 minutes
	PYTHONPATH=tests:examples $(RUN) tests/fault_matrix.py $(FAULTS_ARGS)

clean:  ## remove all that the other targets made
	rm -rf .venv build dist runs bench/out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
