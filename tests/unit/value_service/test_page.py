"""docs/value-service.md: its configuration can be served, and its examples hold against a running service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from services.config.resolve import resolve
from services.config.train import OptimConfig, TrainModelConfig, ValueConfig
from services.runtime.ports import PortReservation
from services.training.control import ServerThread
from tests.scoring import SEQ_LEN, serving
from value_service import openapi
from value_service.app import score_app

PAGE = Path(__file__).parents[3] / "docs" / "value-service.md"
TEXT = PAGE.read_text()
CONFIG = ValueConfig(model=TrainModelConfig(seq_len=SEQ_LEN), optim=OptimConfig(lr=0.1))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.S | re.M)


def test_its_configuration_can_be_served(tmp_path: Path) -> None:
    (block,) = blocks("toml")
    path = tmp_path / "critic.toml"
    path.write_text(block.replace("8000", "0"))
    config = resolve([path], only_critic=True).config
    assert config.value is not None and config.value.model.seq_len == 1024


def test_its_examples_hold(tiny_model: Path) -> None:
    names: dict[str, Any] = {}
    with serving(tiny_model, CONFIG) as service, PortReservation(["port"]) as reservation:
        url = f"http://127.0.0.1:{reservation.ports['port']}"
        server = ServerThread(service.app, url)
        server.start()
        try:
            for block in blocks("python"):
                exec(compile(block.replace("http://127.0.0.1:8000", url), str(PAGE), "exec"), names)
        finally:
            server.stop()
    assert len(blocks("python")) == 3 and "values" in names


def test_its_routes_and_statuses_are_those_of_the_application(tiny_model: Path) -> None:
    with serving(tiny_model, CONFIG) as service:
        assert callable(score_app)
        routes = {
            f"{method.upper()} {path}" for path, methods in service.app.openapi()["paths"].items() for method in methods
        }
    assert set(re.findall(r"`((?:GET|POST) /[\w/]+)`", TEXT.partition("## What is refused")[0])) == routes
    rows = re.findall(r"^\| ([\d, ]+) \|", TEXT, re.M)
    assert {int(code) for row in rows for code in row.split(",")} == set(openapi.SCORE) - {200}
