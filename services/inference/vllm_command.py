"""The command line of vLLM's own server, as this project needs it. Pure, and free of torch.

Notable:
- `--logprobs-mode processed_logprobs`: log-probabilities are those of the sampled distribution, temperature included.
- `--generation-config vllm`: a checkpoint's generation_config.json would change top_p and top_k behind our back.
- `--no-enable-chunked-prefill`: seeded requests end the CPU engine otherwise.
- Without clearing the cache at updates there is no prefix cache either: it would hand a new request old weights' keys.
"""

from __future__ import annotations

import json
from pathlib import Path

from services.config.context import RunContext
from services.config.schema import Config
from services.wire.errors import ConfigError

PROJECT_ROOT = Path(__file__).resolve().parents[2]
EXTENSION = "services.inference.vllm_extension.SnapshotExtension"
MIN_BATCHED_TOKENS = 4096
"""Tokens of one prefill; at least one whole sequence must fit, for prefills are not cut."""
MIN_KV_BYTES, MAX_KV_BYTES = 64 * 2**20, 4 * 2**30
"""Bounds of the cache on CPU."""

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and update
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # half the start-up time
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def vllm_command(config: Config, context: RunContext, port: int) -> tuple[list[str], dict[str, str]]:
    """Build the command of one engine.

    Args:
        config: the run's configuration.
        context: where the model lies.
        port: HTTP port on loopback.

    Returns:
        The argument vector, and what it adds to the environment.

    Raises:
        ConfigError: when vLLM cannot start from this model.
    """
    if context.model_init == "random":
        raise ConfigError(
            ['inference.engine: vLLM cannot start from the same random weights as the trainer; fix: engine = "local"']
        )
    inference = config.inference
    on_cpu = config.deployment.device == "cpu"
    python = Path(inference.vllm_python)
    argv = [
        str(python if python.is_absolute() else PROJECT_ROOT / python),
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", context.model_dir),
        *("--served-model-name", "policy"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", config.model.dtype),
        *("--seed", str(config.seed)),
        *("--max-model-len", str(inference.max_model_len)),
        *("--max-num-seqs", str(inference.max_num_seqs)),
        "--no-enable-chunked-prefill",
        *("--max-num-batched-tokens", str(max(MIN_BATCHED_TOKENS, inference.max_model_len))),
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        "--enable-scale-out",
        *("--worker-extension-cls", EXTENSION),
    ]
    if not inference.clear_cache_on_update:
        argv.append("--no-enable-prefix-caching")
    environment = dict(ENVIRONMENT, PYTHONPATH=str(PROJECT_ROOT))
    if on_cpu:
        argv += ["--enforce-eager", "--kv-cache-memory-bytes", str(kv_cache_bytes(config, Path(context.model_dir)))]
        # One thread, free to move: vLLM's own binding pins it to a core that a trainer may be using.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return argv + inference.vllm_args, environment


def kv_cache_bytes(config: Config, model_dir: Path) -> int:
    """Bytes of cache for `max_num_seqs` sequences of `max_model_len`, within bounds that suit a small machine."""
    path = model_dir / "config.json"
    if not path.is_file():  # a tiny model that is still to be made: `plan` may ask before it exists
        return MIN_KV_BYTES
    model = json.loads(path.read_text())
    model = model.get("text_config", model)
    num_heads = model["num_attention_heads"]
    head_dim = model.get("head_dim") or model["hidden_size"] // num_heads
    num_key_heads = model.get("num_key_value_heads") or num_heads
    token_bytes = (
        2 * model["num_hidden_layers"] * num_key_heads * head_dim * (4 if config.model.dtype == "float32" else 2)
    )
    wanted = token_bytes * config.inference.max_model_len * config.inference.max_num_seqs
    return min(max(wanted, MIN_KV_BYTES), MAX_KV_BYTES)
