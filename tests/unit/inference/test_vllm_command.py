"""The vLLM command line: what must be in it for its log-probabilities and updates to mean what ours mean."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from services.config.context import RunContext
from services.config.schema import Config
from services.inference.vllm_command import MAX_KV_BYTES, MIN_KV_BYTES, kv_cache_bytes, vllm_command
from services.wire.errors import ConfigError


def config_of(**inference: Any) -> Config:
    return Config.model_validate(
        {
            "seed": 3,
            "model": {"path": "m"},
            "algorithm": {"type": "grpo"},
            "env": [{"type": "add"}],
            "inference": {"engine": "vllm"} | inference,
        }
    )


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    model = {"num_attention_heads": 4, "hidden_size": 128, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(model))
    return RunContext(
        run_id="r",
        epoch=0,
        dir=str(tmp_path),
        model_dir=str(tmp_path),
        inference_urls=["http://127.0.0.1:1"],
        policy_url="",
        orchestrator_url="",
        policy_grid_url="",
    )


def test_the_command_serves_exact_log_probabilities_on_loopback(context: RunContext) -> None:
    argv, environment = vllm_command(config_of(max_model_len=600, vllm_args=["--enable-lora"]), context, 1234)
    flags = dict(itertools.pairwise(argv))
    assert Path(argv[0]).is_absolute()
    assert flags["-m"] == "vllm.entrypoints.openai.api_server"
    assert (flags["--host"], flags["--port"], flags["--model"]) == ("127.0.0.1", "1234", context.model_dir)
    assert (flags["--dtype"], flags["--seed"], flags["--served-model-name"]) == ("float32", "3", "policy")
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert flags["--generation-config"] == "vllm"
    assert int(flags["--max-num-batched-tokens"]) >= int(flags["--max-model-len"]) == 600
    assert {"--no-enable-chunked-prefill", "--enable-scale-out"} <= set(argv)
    assert argv[-1] == "--enable-lora"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_prefix_cache_goes_where_updates_do_not_clear_it(context: RunContext) -> None:
    assert "--no-enable-prefix-caching" not in vllm_command(config_of(), context, 1)[0]
    assert "--no-enable-prefix-caching" in vllm_command(config_of(clear_cache_on_update=False), context, 1)[0]


@pytest.mark.parametrize(
    ("sharing", "device", "expected"),
    [("time", "cuda", True), ("time", "cpu", False), ("time_train", "cuda", False), ("none", "cuda", False)],
)
def test_an_engine_can_give_its_memory_back_where_it_shares_gpus_in_turns(
    context: RunContext, sharing: str, device: str, expected: bool
) -> None:
    config = config_of()
    deployment = config.deployment.model_copy(update={"sharing": sharing, "device": device})
    argv, _ = vllm_command(config.model_copy(update={"deployment": deployment}), context, 1)
    assert ("--enable-sleep-mode" in argv) == expected


def test_the_token_goes_in_by_its_files_path_and_a_middleware_asks_for_it(context: RunContext) -> None:
    without = vllm_command(config_of(), context, 1)
    argv, environment = vllm_command(config_of(), context.model_copy(update={"token_file": "/runs/x/token"}), 1)
    at = argv.index("--middleware")
    assert argv[at + 1] == "services.inference.vllm_guard.TokenMiddleware"
    assert argv[:at] + argv[at + 2 :] == without[0]
    assert environment == without[1] | {"COUNTERPOINT_TOKEN_FILE": "/runs/x/token"}
    assert environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0" and environment["VLLM_API_KEY"] == ""


@pytest.mark.parametrize(
    "arguments",
    [["--host", "0.0.0.0"], ["--hos=0.0.0.0"], ["--api_key", "x"], ["--middleware", "m"], ["--enable-prompt-embeds"],
     ["--enable-lora", "--config=x.yaml"], ["--uds", "x"], ["--no-enable-sleep-mode"]],
)  # fmt: skip
def test_who_reaches_the_server_and_whom_it_asks_is_not_for_vllm_args_to_say(
    context: RunContext, arguments: list[str]
) -> None:
    with pytest.raises(ConfigError, match="is decided by the run"):
        vllm_command(config_of(vllm_args=arguments), context, 1)


def test_random_weights_are_refused(context: RunContext) -> None:
    with pytest.raises(ConfigError, match="random"):
        vllm_command(config_of(), context.model_copy(update={"model_init": "random"}), 1)


def test_the_cache_holds_every_sequence_within_its_bounds(context: RunContext) -> None:
    """2 tensors x 2 layers x 2 key heads x 32 wide x 4 bytes = 1,024 bytes a token."""
    folder = Path(context.model_dir)
    assert kv_cache_bytes(config_of(max_model_len=1024, max_num_seqs=256), folder) == 1024 * 1024 * 256
    assert kv_cache_bytes(config_of(max_model_len=8, max_num_seqs=1), folder) == MIN_KV_BYTES
    assert kv_cache_bytes(config_of(max_model_len=10**6, max_num_seqs=999), folder) == MAX_KV_BYTES
