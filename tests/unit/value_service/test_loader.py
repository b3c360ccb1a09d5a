"""`POST /load`: weights of an exported critic, whole or not at all, from the folders that were named and no others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.config.train import LoraConfig, OptimConfig, TrainModelConfig, ValueConfig
from services.model.export import export_critic
from services.model.head import Critic
from services.model.load import load_causal_lm
from tests.exports import state_of
from tests.scoring import SEQ_LEN, InProcess, call, serving

MODEL, OPTIM = TrainModelConfig(seq_len=SEQ_LEN), OptimConfig(lr=0.1)
JSON = {"Content-Type": "application/json"}
PROBE = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory) -> Path:
    """A root with exported critics: a good one, and others that do not fit."""
    root = tmp_path_factory.mktemp("roots") / "critics"
    root.mkdir()
    facts: dict[str, Any] = {"gamma": 1.0, "run": "other", "source": "checkpoints/step_000007/critic"}
    critic = Critic(load_causal_lm(tiny_model), head_init_std=0.3, seed=9)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    export_critic(state_of(critic), tiny_model, root / "good", support="scalar", **facts)
    for name in ("truncated", "not-finite", "other-rope", "linked"):
        shutil.copytree(root / "good", root / name)
    weights = root / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    tensors = load_file(root / "not-finite" / "model.safetensors")
    tensors["score.weight"][0, 0] = float("nan")
    save_file(tensors, root / "not-finite" / "model.safetensors", {"format": "pt"})
    config = json.loads((root / "other-rope" / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (root / "other-rope" / "config.json").write_text(json.dumps(config))
    shutil.copytree(root / "good", root.parent / "outside")
    (root / "linked" / "model.safetensors").unlink()
    (root / "linked" / "model.safetensors").symlink_to(root.parent / "outside" / "model.safetensors")
    (root / "link").symlink_to(root.parent / "outside")
    shutil.copytree(tiny_model, root / "language-model")
    return root


@pytest.fixture
def service(tiny_model: Path, folders: Path) -> Iterator[InProcess]:
    with serving(tiny_model, ValueConfig(model=MODEL, optim=OPTIM, load_roots=[str(folders)])) as started:
        yield started


async def load(service: InProcess, path: object) -> tuple[int, dict[str, Any]]:
    answer = await call(service.app, "POST", "/load", json.dumps({"path": str(path)}).encode(), JSON)
    assert len(answer.body) < 2000
    return answer.status, json.loads(answer.body)


async def score(service: InProcess) -> dict[str, Any]:
    body = json.dumps({"token_ids": PROBE}).encode()
    return json.loads((await call(service.app, "POST", "/v1/score", body, JSON)).body)


async def test_values_after_a_load_are_those_of_the_exported_critic_and_the_step_goes_on(
    service: InProcess, folders: Path, tiny_model: Path
) -> None:
    service.board.progress(steps_done=5)
    before = await score(service)
    code, reply = await load(service, folders / "good")
    assert (code, reply) == (
        200,
        {"critic_step": 5, "num_loads": 1, "run": "other", "source": "checkpoints/step_000007/critic"},
    )
    after = await score(service)
    assert after["critic_step"] == 5 and not np.allclose(before["values"], after["values"], atol=1e-3)
    with serving(tiny_model, ValueConfig(model=MODEL, optim=OPTIM)) as other:
        state = load_file(folders / "good" / "model.safetensors")
        with torch.no_grad():
            for name, parameter in other.critic.named_parameters():
                parameter.copy_(state[name.replace("backbone.", "model.").replace("head.", "score.")])
        assert np.allclose(after["values"], (await score(other))["values"], atol=1e-6)
    status = json.loads((await call(service.app, "GET", "/status")).body)
    assert (status["num_loads"], status["steps_done"]) == (1, 5)


async def test_moments_begin_anew_and_updates_are_counted_on(service: InProcess, folders: Path) -> None:
    optimizer = service.part.optimizer
    state = optimizer.state_dict()
    for entry in state["moments"].values():
        entry["exp_avg"] = torch.ones_like(entry["exp_avg"])
        entry["num_steps"] = 3
    optimizer.load_state_dict(state | {"num_updates": 3})
    assert (await load(service, folders / "good"))[0] == 200
    after = optimizer.state_dict()
    assert after["num_updates"] == 3
    assert all(entry["num_steps"] == 0 and not entry["exp_avg"].any() for entry in after["moments"].values())


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("truncated", 422, ""),
        ("not-finite", 422, "head.weight holds a number that is not finite"),
        ("other-rope", 422, "another rms_norm_eps"),
        ("language-model", 422, "no exported critic"),
        ("nothing", 422, "no such folder"),
        ("linked", 403, "not below value.load_roots"),
        ("link", 403, "not below value.load_roots"),
        ("../outside", 403, "not below value.load_roots"),
        ("good/../../outside", 403, "not below value.load_roots"),
        ("a\0b", 422, "not a path"),
        ("x" * 3000, 422, "path"),
    ],
)
async def test_what_does_not_fit_is_refused_and_nothing_changes(service, folders: Path, name, code, reason) -> None:
    before = {name: parameter.clone() for name, parameter in service.critic.named_parameters()}
    got, reply = await load(service, f"{folders}/{name}")
    assert got == code and reason in reply["error"] and "\n" not in reply["error"]
    assert all(torch.equal(before[name], parameter) for name, parameter in service.critic.named_parameters())
    assert service.board.snapshot().num_loads == 0
    assert (await load(service, folders / "good"))[0] == 200


async def test_another_support_and_adapters_are_refused(tiny_model: Path, folders: Path) -> None:
    from services.config.train import TwoHotConfig

    for more, code, reason in (
        ({"loss": TwoHotConfig(type="two_hot")}, 422, "a head for a scalar"),
        ({"lora": LoraConfig()}, 409, "value.lora"),
    ):
        config = ValueConfig(model=MODEL, optim=OPTIM, load_roots=[str(folders)], **more)
        with serving(tiny_model, config) as service:
            got, reply = await load(service, folders / "good")
            assert got == code and reason in reply["error"]


async def test_without_roots_and_with_a_wrong_body_nothing_is_read(tiny_model: Path, folders: Path) -> None:
    with serving(tiny_model, ValueConfig(model=MODEL, optim=OPTIM)) as service:
        code, reply = await load(service, folders / "good")
        assert code == 403 and "names no folder" in reply["error"]
        for body, headers, expected in (
            (b"{}", JSON, 422),
            (b'{"path": ""}', JSON, 422),
            (b'{"path": "a", "secret": 1}', JSON, 422),
            (b"{", JSON, 400),
            (b"[" * 5000, JSON, 422),
            (b" " * 70_000, JSON, 413),
            (b"{}", {}, 415),
        ):
            answer = await call(service.app, "POST", "/load", body, headers)
            assert answer.status == expected and b"secret" not in answer.body, body[:20]
