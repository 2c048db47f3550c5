# make quickstart   train a tiny model on this CPU (SEED=1 for another draw of everything)
# make test         everything CI runs: linters and all tests, and the tests of make test-vllm026
#                   FILE=grpo_megatron/models/forward.py: the tests of one file (tests/covering.py)
# make format       sort imports and format all Python
# make test-fast    the tests without long runs, under two minutes
# make test-vllm026 the fast tests and a training run with vLLM 0.26, torch 2.11 and Python 3.12, in .venv-vllm026
# make test-gpu     the GPU tests, for one GPU of 80 GB, run by GPU_PYTHON (default python3); GROUP=1 to 8: a part of
#                   them, meant for six minutes each (tests/gpu/conftest.py says what is in which)
# make test-gpu-hour  an hour on one GPU of 80 GB, run by GPU_PYTHON: figures beside published ones, as a page in outputs/hour. It goes
#                   on where it stopped; HOUR="--minutes 3 --parts a" cuts it. Without a GPU the same in toy sizes
# make docs         the documentation as a site, in outputs/site
# make soak         STEPS=200 training steps on two ranks under some thirty faults, in an order drawn from SEED; at the end
#                   everything must be as in an undisturbed run. Prints the faults as a table; takes about six minutes.
#                   Before it, the tests that are too long for make test, and the GPU tests rehearsed with tiny models.
#                   FAULTS=7: with seven of them. Then 40 losses of ranks under trainer.healing, also drawn from SEED
# All but test-gpu and test-gpu-hour set up their environment first, once.

PYTHON ?= python3.11
PYTHON312 ?= python3.12
HAS_PYTHON312 = $(shell command -v $(PYTHON312) || ls $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12*/bin/python3.12 2>/dev/null)
VENV := .venv
VENV026 := .venv-vllm026
DOCS := .venv-docs
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
GPU_PYTHON ?= python3
SEED ?= 0
STEPS ?= 200
# Three workers: many tests wait for processes. The tests of a file stay on one worker, and files start in the order that tests/conftest.py sets.
PYTEST := -m pytest -n 3 --dist loadfile --no-loadscope-reorder
# Tests of what is between this program and torch, transformers, Megatron-Core or vLLM: all that differs on the second stack.
ON_BOTH := contract convert/test_megatron_lm.py convert/test_round_trip.py convert/test_vision.py e2e/test_examples.py \
	exact/test_exact.py models rollout
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # pip compiles nothing: the first import writes the bytecode

.PHONY: format test-gpu test-gpu-hour setup quickstart docs test test-fast test-vllm026 soak lint clean

setup: $(INSTALLED)

# --no-deps: the locks are complete, and the resolver would add CUDA builds that break vLLM on CPU (see cpu.lock).
$(INSTALLED): requirements/cpu.lock requirements/dev.lock requirements/install.sh
	@bash requirements/install.sh $(PYTHON) $(VENV)
	@touch $@

$(VENV026)/.installed: requirements/cpu-vllm026.lock requirements/dev.lock requirements/install.sh
	@bash requirements/install.sh $(PYTHON312) $(VENV026) requirements/cpu-vllm026.lock
	@touch $@

$(DOCS)/.installed: requirements/docs.lock | $(INSTALLED)
	@$(BIN)/python -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --no-deps --no-compile --disable-pip-version-check -r requirements/docs.lock
	@touch $@

quickstart: $(INSTALLED)
	@$(BIN)/python -m grpo_megatron quickstart --seed $(SEED)

docs: $(DOCS)/.installed
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "outputs/site/index.html"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ifdef FILE
test: $(INSTALLED)
	$(BIN)/python $(PYTEST) -m "not soak" $$($(BIN)/python -m tests.covering $(FILE))
else
test:
	@$(MAKE) --jobs 3 lint docs $(if $(HAS_PYTHON312),$(VENV026)/.installed)
	$(BIN)/python $(PYTEST) -m "not soak"
	$(if $(HAS_PYTHON312),$(MAKE) test-vllm026,@echo "make test-vllm026 is left out: there is no $(PYTHON312) here")
endif

test-fast: $(INSTALLED)
	$(BIN)/python $(PYTEST) -m "not slow and not soak"

test-vllm026: $(VENV026)/.installed
	$(VENV026)/bin/python $(PYTEST) -m "not soak and (not slow or both_stacks)" $(ON_BOTH:%=tests/%)

# Not in .venv, whose vLLM is for the CPU: in an environment of a GPU lock (requirements/install.sh), or one like it.
# Without its packages make says so, in place of Python's traceback.
NEEDS_LOCK = @$(GPU_PYTHON) -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch", "megatron", "pytest"))))' \
	|| { echo "error: $(GPU_PYTHON) has no torch, Megatron-Core or pytest: make $@ GPU_PYTHON=VENV/bin/python, with a VENV by requirements/install.sh" >&2; exit 2; }

test-gpu:
	$(NEEDS_LOCK)
	@failed=0; for file in tests/gpu/test_$(GROUP)*.py; do $(GPU_PYTHON) -m pytest $$file || failed=1; done; exit $$failed

test-gpu-hour:
	$(NEEDS_LOCK)
	@$(GPU_PYTHON) -m tools.benchmarks hour $(HOUR)

soak: $(INSTALLED)
	@$(BIN)/python $(PYTEST) -q -m soak
	@GRPO_GPU_TESTS_ON=cpu $(MAKE) test-gpu GPU_PYTHON=$(BIN)/python
	@$(BIN)/python -m tests.soak --steps $(STEPS) --seed $(SEED) $(if $(FAULTS),--faults $(FAULTS))
	@$(BIN)/python -m tests.soak.healing --seed $(SEED)

clean:
	rm -rf $(VENV) $(VENV026) $(DOCS) outputs
