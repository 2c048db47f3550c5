# make quickstart   train a tiny model on this CPU (SEED=1 for another draw of everything)
# make test         everything CI runs: linters and all tests
# make test-fast    the tests without long runs, under two minutes
# make test-gpu     the GPU tests, for one GPU of 80 GB, run by GPU_PYTHON (default python3); GROUP=1 to 4: a quarter of
#                   them, under ten minutes each (tests/gpu/conftest.py says what is in which)
# All but test-gpu set up .venv first, once.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
GPU_PYTHON ?= python3
SEED ?= 0
# Two workers. The tests of a file stay on one worker, and files start in the order that tests/conftest.py sets.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder
QUICKSTART := outputs/quickstart
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # pip compiles nothing: the first import writes the bytecode

.PHONY: test-gpu setup quickstart test test-fast lint clean

setup: $(INSTALLED)

# --no-deps: the locks are complete, and the resolver would add CUDA builds that break vLLM on CPU (see cpu.lock).
$(INSTALLED): requirements/cpu.lock requirements/dev.lock requirements/install.sh
	@bash requirements/install.sh $(PYTHON) $(VENV)
	@touch $@

$(QUICKSTART)/seed-$(SEED): | $(INSTALLED)
	@$(BIN)/python tools/prepare_data.py arithmetic $(QUICKSTART)/data --seed $(SEED) --force
	@$(BIN)/python tools/prepare_data.py model --preset quickstart $(QUICKSTART)/model \
		--tokenizer $(QUICKSTART)/data/tokenizer --seed $(SEED) --std 0.05 --force
	@rm -f $(QUICKSTART)/seed-* && touch $@

quickstart: $(INSTALLED) $(QUICKSTART)/seed-$(SEED)
	@rm -rf $(QUICKSTART)/run
	@$(BIN)/python -m grpo_megatron train examples/quickstart.yaml \
		data.seed=$(SEED) rollout.seed=$(SEED) trainer.seed=$(SEED)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python $(PYTEST)

test-fast: $(INSTALLED)
	$(BIN)/python $(PYTEST) -m "not slow"

# Not in .venv, whose torch is for the CPU: in an environment with GPU builds of everything, and pytest.
test-gpu:
	$(GPU_PYTHON) -m pytest $(if $(GROUP),tests/gpu/test_$(GROUP)_*.py,tests/gpu)

clean:
	rm -rf $(VENV) outputs
