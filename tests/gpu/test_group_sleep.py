"""A train group on a GPU asleep: a twentieth of its memory stays at most, and it takes the steps that it would have."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.model.mesh import Mesh
from services.runtime.ports import PortReservation
from services.training.board import StatusBoard
from services.training.ranks import Ranks
from services.training.sleeper import Sleeper
from tests.architectures import VOCABULARY
from tests.processes.cases.checkpoints import role_in, without_time

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NUM_STEPS = 3


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """A group of one, as torchrun makes it."""
    with PortReservation(["store"]) as reserved:
        port = reserved.ports["store"]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    ranks = Ranks.join(deadline_s=60, device="cuda")
    yield ranks
    ranks.close()


def write_model(folder: Path) -> Path:
    """33 M parameters: 0.4 GB with moments in float32, far above what kernels keep for themselves."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_asleep_the_device_has_its_memory_back_and_awake_the_steps_are_the_same(
    role: str, ranks: Ranks, tmp_path: Path
) -> None:
    mesh, folder = Mesh.join(cp=1, ep=1, device=torch.device("cuda", 0)), write_model(tmp_path / "model")
    settings = {"model": {"dtype": "bfloat16"}}
    rows = []
    for sleeps in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        own = role_in(folder, role, mesh, ranks, **settings)
        sleeper = Sleeper(own.part, StatusBoard(role))
        for _ in range(NUM_STEPS):
            rows.append(without_time(own.step()))
            if sleeps:
                allocated, free = torch.cuda.memory_allocated() - before, torch.cuda.mem_get_info()[0]
                moved = sleeper.fall_asleep()
                assert moved > 0.7 * allocated, "gradients are let go"
                assert torch.cuda.memory_allocated() - before < 0.05 * allocated
                assert torch.cuda.mem_get_info()[0] - free > 0.9 * allocated
                assert sleeper.wake_up() == moved
        del own, sleeper
    first, second = rows[:NUM_STEPS], rows[NUM_STEPS:]
    for one, other in zip(first, second, strict=True):
        assert one == pytest.approx(other, rel=1e-2, abs=1e-4), "up to what atomics do to bf16"
