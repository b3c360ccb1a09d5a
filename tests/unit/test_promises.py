"""SECURITY.md and ASSUMPTIONS.md: every promise names tests, and they exist; every listener has a row in the table."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from services.config.ports import port_names
from services.config.resolve import resolve
from services.launch.models import ModelSource
from services.launch.planner import Site, plan

ROOT = Path(__file__).parents[2]
SECURITY, ASSUMPTIONS = (ROOT / name for name in ("SECURITY.md", "ASSUMPTIONS.md"))
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def names_in(name: str) -> set[str]:
    tree = ast.parse((ROOT / name).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds) and node.name.startswith("test_")}


def sections(page: Path) -> dict[str, str]:
    """Text by heading of the second level."""
    parts = re.split(r"^## (.*)$", page.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("page", [SECURITY, ASSUMPTIONS], ids=lambda page: page.name)
def test_every_test_that_is_named_exists(page: Path) -> None:
    named = NAMED.findall(page.read_text())
    assert len(named) > 20
    assert len(re.findall(r"`tests/", page.read_text())) == len(named), "a test that is named in another way"
    for file, test in named:
        assert test in names_in(file), f"{file}::{test}"


def test_every_rule_of_security_names_a_test() -> None:
    text = next(text for heading, text in sections(SECURITY).items() if heading.startswith("Rules"))
    rules = re.split(r"^\d+\. ", text, flags=re.M)[1:]
    assert len(rules) == 10
    for rule in rules:
        assert NAMED.search(rule), rule


def test_every_promise_of_assumptions_names_a_test_and_says_what_must_hold() -> None:
    promises = {heading: text for heading, text in sections(ASSUMPTIONS).items() if heading != "For all of them"}
    assert len(promises) >= 10
    for heading, text in promises.items():
        tests, _, assumed = text.partition("\n\n- ")
        assert tests.strip().startswith("Tests: ") and NAMED.search(tests), heading
        assert assumed, heading


def test_every_process_that_listens_has_a_row_in_the_table_of_listeners(tmp_path: Path) -> None:
    """Of a plan with everything: a critic, and several engines behind a router."""
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npath = "tiny:add"\n[algorithm]\ntype = "sao"\n[[env]]\ntype = "add"\nmax_trace_tokens = 32\n'
        "[value]\n[deployment]\nnum_inference_gpus = 2\n"
    )
    config = resolve([path], []).config
    ports = {name: 20000 + index for index, name in enumerate(port_names(config))}
    layout = plan(
        config, ports, run_dir=tmp_path, run_id="r", epoch=1, model=ModelSource(tmp_path), site=Site(tmp_path)
    )  # fmt: skip
    text = sections(SECURITY)["Listeners"]
    rows = [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| ")][1:]
    for process in layout.processes:
        name = re.sub(r"-?\d+$", "", process.name)
        assert process.ports and any(f"`{name}`" in row for row in rows), process.name
    assert {"router", "router-guard", "policy", "value", "orchestrator"} <= {p.name for p in layout.processes}


@pytest.mark.parametrize("page", [SECURITY, ASSUMPTIONS], ids=lambda page: page.name)
def test_pages_name_no_host_no_address_and_no_path_of_a_machine(page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r"https?://|@\w+\.\w+", text)
    assert not re.findall(r"(?<![\w.])/(?:home|work|root|tmp|usr)/", text)
    assert max(map(len, text.splitlines())) <= 160 or "|" in max(text.splitlines(), key=len)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
