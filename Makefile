# Needs make and Python 3.10 or newer; everything else goes into .venv, which the first command makes.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# One more than two cores: a third of the time tests wait for processes that they start, stop or kill.
JOBS ?= 3
PYTEST := $(VENV)/bin/pytest --numprocesses $(JOBS) --dist worksteal
# Python compiles what is imported. To compile all that gets installed would take a minute.
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
# Extra flags for the torch line alone, for example an index of wheels for another CUDA version, or for the CPU.
TORCH_FLAGS ?=
# Passed on to the command: make test ARGS="-k masks", make test ARGS="-n 0 --pdb" (in one process), make demo ARGS="--help".
ARGS ?=
# Some containers set it: each of the hundreds of processes that tests start would compile library and tests anew.
unexport PYTHONDONTWRITEBYTECODE
CODE := $(wildcard rlstruct agents batchers algos tests conftest.py tutorials benchmarks .ci)
# Empty files that say what .venv holds, so that a second call installs nothing.
TRAIN := $(VENV)/.installed-train
INSTALLED := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo test test-all torch gpu soak portable lint format types wheel docs bench-cpu compare peers clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(TRAIN) ## train REINFORCE on CartPole-v1 until it is solved, ten seconds on two cores
	$(RUN) tutorials/train_cartpole.py $(ARGS)

test: $(INSTALLED) ## run the tests that a change needs, about five minutes on two cores
	$(PYTEST) $(ARGS)

test-all: $(INSTALLED) ## run these, tutorials, site, benchmarks, compilers, groups of learners; then half a minute of soak
	$(PYTEST) -m "not exhaustive" $(ARGS)
	PYTHONPATH=tests $(RUN) tests/batchers/soak.py --seconds 30 & soak=$$!; \
	RLSTRUCT_PORTABLE=1 $(PYTEST) --numprocesses 0 -m "not exhaustive" tests/batchers/test_weights.py; code=$$?; \
	wait $$soak && exit $$code

torch: ## run the core tests with the oldest and the newest torch, each in an environment of its own
	bash .ci/torch_versions

gpu: ## two hours on a GPU, tests and benchmarks, with the packages that are there: make gpu ARGS="--command 1" for nine minutes
	$(PYTHON) .ci/on_gpu.py $(ARGS)

soak: $(INSTALLED) ## break batchers at random for ten minutes: make soak ARGS="--seconds 60 --seed 3"
	PYTHONPATH=tests $(RUN) tests/batchers/soak.py $(ARGS)

portable: $(INSTALLED) ## test workers as macOS starts them, here too, ten minutes on two cores; then a minute of soak
	RLSTRUCT_PORTABLE=1 $(PYTEST) -m "not exhaustive and not gpu" --ignore tests/batchers/test_cluster.py \
	  tests/batchers tests/mistakes $(ARGS)
	RLSTRUCT_PORTABLE=1 PYTHONPATH=tests $(RUN) tests/batchers/soak.py --seconds 60

lint: $(INSTALLED) ## check style, docstrings, annotations and format; changes nothing
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/ruff format --check $(CODE)

format: $(INSTALLED) ## rewrite the code in the house format
	$(VENV)/bin/ruff check --fix $(CODE)
	$(VENV)/bin/ruff format $(CODE)

types: $(INSTALLED) ## build and install the wheel elsewhere, check its types and run it there
	bash .ci/check_wheel

wheel: $(INSTALLED) ## build the wheel into dist/
	rm -rf build
	$(RUN) -m build --wheel --no-isolation --outdir dist

docs: $(INSTALLED) ## build the documentation site into build/docs/site
	$(RUN) .ci/build_docs.py

bench-cpu: $(INSTALLED) ## collection on the CPU beside other libraries (make peers; RLSTRUCTURES=checkout of v0.2)
	$(RUN) benchmarks/cpu_collect.py --rlstructures "$(RLSTRUCTURES)"

compare: $(INSTALLED) ## measure the README's comparison at this commit, up to 45 idle minutes: RLSTRUCTURES=… CLEANRL=… (checkouts)
	$(RUN) benchmarks/cpu_collect.py --part throughput slow --rlstructures "$(RLSTRUCTURES)"
	$(RUN) benchmarks/time_to_475.py --jobs 2 --cleanrl "$(CLEANRL)"
	$(RUN) benchmarks/robustness.py
	$(RUN) benchmarks/tables.py --newest

peers: ## make .venv-peers with the libraries that the benchmarks compare with
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip --disable-pip-version-check install --quiet --constraint benchmarks/peers/constraints.txt $(TORCH_FLAGS) torch
	@.venv-peers/bin/python -m pip --disable-pip-version-check install --quiet --constraint benchmarks/peers/constraints.txt --requirement benchmarks/peers/requirements.txt

clean: ## remove what the commands above made, the environment too
	rm -rf $(VENV) .venv-peers build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# torch goes first, on a line of its own: it is the only package whose wheel depends on the machine.
$(TRAIN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "rlstruct needs Python 3.10 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." \
	       "Name another one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV): the first time takes a few minutes, torch is large."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH_FLAGS) torch
	@$(PIP) --editable '.[train]'
	@touch $@

$(INSTALLED): $(TRAIN)
	@echo "Installing what the tests need."
	@$(PIP) --editable '.[train,dev,docs]'
	@touch $@
