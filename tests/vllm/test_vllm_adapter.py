"""vLLM's real server takes an adapter folder for a snapshot: what it samples then is what the merged model says."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from services.config.context import RunContext
from services.config.schema import Config
from services.config.train import PolicyLoraConfig
from services.model.load import load_causal_lm
from services.model.lora import adapter_files, add_lora, merged_state_dict
from tests.engines import PROMPT, client_of, largest_difference, make_snapshot, vllm_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TOLERANCE = 1e-4


def make_adapter(base: Path, folder: Path, merged: Path, *, seed: int) -> None:
    """An adapter folder as the trainer writes it, and the whole model that it stands for."""
    plain = load_causal_lm(base)
    config = PolicyLoraConfig(rank=4, publish="adapter")
    model = add_lora(load_causal_lm(base), config, frozen=[], role="policy", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    folder.mkdir()
    adapter_files(model.state_dict(), model, folder)
    plain.load_state_dict(merged_state_dict(model.state_dict(), model))
    plain.save_pretrained(merged)


async def test_an_adapter_is_added_to_the_checkpoint_each_time_anew(tmp_path: Path) -> None:
    base = make_snapshot(tmp_path / "base", 0)
    for version in (1, 2):
        make_adapter(base, tmp_path / f"a{version}", tmp_path / f"m{version}", seed=version)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    config = Config.model_validate(
        {
            "model": {"path": str(base)},
            "algorithm": {"type": "grpo"},
            "env": [{"type": "add"}],
            "inference": {"engine": "vllm", "max_num_seqs": 32},
        }
    )
    context = RunContext(
        run_id="test",
        epoch=0,
        dir=str(tmp_path),
        model_dir=str(base),
        inference_urls=[f"http://127.0.0.1:{port}"],
        policy_url="",
        orchestrator_url="",
        policy_grid_url="",
    )
    with vllm_engine(config, context, tmp_path / "vllm.log") as url:
        client = client_of(url)
        await client.wait_ready(300)
        for version in (1, 2):
            await client.update_weights(tmp_path / f"a{version}", version, deadline_s=120)
            generation = await client.generate(
                PROMPT, max_tokens=24, temperature=1.0, seed=1, deadline_s=60, ignore_eos=True
            )
            assert [tuple(span) for span in generation.spans] == [(0, 24, version)]
            assert largest_difference(tmp_path / f"m{version}", PROMPT, generation, 0, 24) < TOLERANCE
            assert largest_difference(base, PROMPT, generation, 0, 24) > 10 * TOLERANCE
        await client.close()
