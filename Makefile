# Everything from a bare clone with python3, make and the package registries:
#   make demo      decode held-out items of the embedded checkpoint with every method
#   make test      the test suite (ARGS="tests/test_model.py -k padding" for a part of it)
#   make test-all  the test suite with the slow variants
#   make lint      ruff and pyright
#   make aot       compile every kernel for A100, L4 and H100, and a whole LLaDA-8B decode for H200, without a GPU
#                  (needs 6 GB of CUDA wheels)
#   make clean     remove the environments and every cache

UV := .bootstrap/bin/uv
RUN := $(UV) run --frozen
PYTEST := $(RUN) pytest -n 2 $(ARGS)

export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: demo test test-all lint aot clean

demo: $(UV)
	$(RUN) polestar demo

test: $(UV)
	$(PYTEST)

test-all: $(UV)
	$(PYTEST) -m "slow or not slow"

lint: $(UV)
	$(UV) lock --check
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) pyright

# In an environment of its own: the CUDA wheels are not needed for anything else here.
aot: export UV_PROJECT_ENVIRONMENT = .venv-cuda
aot: $(UV)
	$(RUN) --extra cuda13 python benchmarks/aot_kernels.py $(ARGS)
	$(RUN) --extra cuda13 polestar plan --model llada-8b --gpu h200

clean:
	rm -rf .bootstrap .venv .venv-cuda .cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# uv makes .venv from uv.lock, with a Python of its own choice where python3 is too old or too new.
$(UV):
	@python3 -c 'import ensurepip, venv' 2> /dev/null || \
	  { echo "make needs python3 with the venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	python3 -m venv .bootstrap
	.bootstrap/bin/pip install --quiet 'uv>=0.9,<1'
