"""The command line of vLLM's own server, as this project needs it. Pure, and free of torch.

Notable:
- `--logprobs-mode processed_logprobs`: log-probabilities are those of the sampled distribution, temperature included.
- `--generation-config vllm`: a checkpoint's generation_config.json would change top_p and top_k behind our back.
- `--no-enable-chunked-prefill`: seeded requests end the CPU engine otherwise.
- An engine that shares its GPUs in turns gets the allocator that can give weights and cache back. Its `/is_sleeping`
  would say true without it, as a paused engine's does.
- Without clearing the cache at updates there is no prefix cache either: it would hand a new request old weights' keys.
"""

from __future__ import annotations

import json
from pathlib import Path

from services.config.context import RunContext
from services.config.schema import Config
from services.runtime.auth import TOKEN_FILE_VARIABLE
from services.wire.errors import ConfigError

PROJECT_ROOT = Path(__file__).resolve().parents[2]
EXTENSION = "services.inference.vllm_extension.SnapshotExtension"
TOKEN_MIDDLEWARE = "services.inference.vllm_guard.TokenMiddleware"  # noqa: S105 - a class's name
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
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # it would unpickle what `/collective_rpc` is sent
    "VLLM_API_KEY": "",  # another token than the run's, and for half of the routes
}

NOT_ALLOWED = (
    *("--host", "--port", "--uds", "--api-key", "--middleware", "--config"),
    *("--enable-prompt-embeds", "--no-enable-sleep-mode"),
)
"""Of vLLM's arguments: who could reach the server, what it asks for, tensors in requests (torch unpickles them), and
what makes a sleep keep the memory."""


def vllm_command(
    config: Config, context: RunContext, port: int, *, host: str = "127.0.0.1"
) -> tuple[list[str], dict[str, str]]:
    """Build the command of one engine.

    Args:
        config: the run's configuration.
        context: where the model lies.
        port: HTTP port.
        host: address that it listens on.

    Returns:
        The argument vector, and what it adds to the environment.

    Raises:
        ConfigError: when vLLM cannot start from this model, or an argument is not for `vllm_args` to give.
    """
    if context.model_init == "random":
        raise ConfigError(
            ['inference.engine: vLLM cannot start from the same random weights as the trainer; fix: engine = "local"']
        )
    inference = config.inference
    _check_arguments(inference.vllm_args)
    on_cpu = config.deployment.device == "cpu"
    python = Path(inference.vllm_python)
    argv = [
        str(python if python.is_absolute() else PROJECT_ROOT / python),
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", context.model_dir),
        *("--served-model-name", "policy"),
        *("--host", host, "--port", str(port)),
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
    if inference.tp > 1:
        argv += ["--tensor-parallel-size", str(inference.tp)]
    if not inference.clear_cache_on_update:
        argv.append("--no-enable-prefix-caching")
    environment = dict(ENVIRONMENT, PYTHONPATH=str(PROJECT_ROOT))
    if config.deployment.sharing == "time" and not on_cpu:  # vLLM on CPU refuses the flag; there a sleep is a pause
        argv.append("--enable-sleep-mode")
    if context.token_file is not None:  # the file's path: a token in argv could be read by everybody on the machine
        argv += ["--middleware", TOKEN_MIDDLEWARE]
        environment[TOKEN_FILE_VARIABLE] = context.token_file
    if on_cpu:
        argv += ["--enforce-eager", "--kv-cache-memory-bytes", str(kv_cache_bytes(config, Path(context.model_dir)))]
        # One thread, free to move: vLLM's own binding pins it to a core that a trainer may be using.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return argv + inference.vllm_args, environment


def _check_arguments(arguments: list[str]) -> None:
    for argument in arguments:
        word = argument.partition("=")[0].replace("_", "-")
        # argparse takes the beginning of a word for the word
        taken = [name for name in NOT_ALLOWED if len(word) > 2 and name.startswith(word)]
        if taken:
            raise ConfigError([f"inference.vllm_args: {word} is decided by the run; fix: delete it"])


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
