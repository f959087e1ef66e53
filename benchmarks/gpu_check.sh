#!/usr/bin/env bash
# Everything that only a GPU can tell, in under eight minutes, its own environment included (docs/kernels.md, "On a GPU"):
#
#   benchmarks/gpu_check.sh [--json FILE] [--budget SECONDS]
#
# It runs in $GPU_CHECK_PYTHON if that is set; else in python3, if that has all it needs; else in .venv-cuda, which uv
# makes from uv.lock (6 GB of CUDA wheels, a minute or two where the network is fast).
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
begin=$SECONDS

works() {
  "$1" -c '
import jax, rich, polestar_jax.benchmark
assert tuple(map(int, jax.__version__.split(".")[:2])) == (0, 11), f"jax {jax.__version__} is not 0.11"
assert jax.default_backend() == "gpu", f"jax runs on {jax.default_backend()} here"
if jax.devices()[0].compute_capability.startswith("8."):
    import jax_triton'
}

python=${GPU_CHECK_PYTHON:-}
if [[ " $* " == *" --rehearse "* ]]; then
  exec "${python:-python3}" benchmarks/gpu_check.py "$@"
elif [[ -n $python ]]; then
  works "$python" || { echo "GPU_CHECK_PYTHON=$python cannot run this, see above" >&2; exit 2; }
elif refusal=$(works python3 2>&1); then
  python=python3
else
  echo "python3 cannot run this (${refusal##*$'\n'}): making .venv-cuda"
  extra=cuda13
  # Drivers before 580 know CUDA 12 only.
  if [[ $(nvidia-smi 2> /dev/null || true) =~ CUDA\ Version:\ *12 ]]; then extra=cuda12; fi
  uv=$(command -v uv || echo .bootstrap/bin/uv)
  if ! command -v "$uv" > /dev/null; then
    python3 -m venv .bootstrap
    .bootstrap/bin/pip install --quiet 'uv>=0.9,<1'
  fi
  UV_PROJECT_ENVIRONMENT=.venv-cuda "$uv" sync --frozen --no-dev --extra $extra
  python=$PWD/.venv-cuda/bin/python
  works "$python" || { echo "jax sees no GPU, see above; nvidia-smi should list one" >&2; exit 2; }
fi
spent=$((SECONDS - begin))
echo "$python, ready after $spent s"
exec "$python" benchmarks/gpu_check.py --budget $((470 - spent > 240 ? 470 - spent : 240)) "$@"
