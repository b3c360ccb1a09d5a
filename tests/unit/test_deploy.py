"""The images and the compose file: linted, pinned, without root, and with commands that this command line takes."""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
from compose_spec import PyCompose
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from services.launch.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERFILES = sorted(DEPLOY.glob("Containerfile.*"))


def steps_of(containerfile: Path) -> list[tuple[str, str]]:
    """Instructions with their words; comments gone, continued lines joined."""
    lines = [line for line in containerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def composed() -> dict[str, Any]:
    """The compose file with every variable at its default."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "compose.yaml").read_text())
    compose = PyCompose.from_yaml(text)
    compose.validate()
    return compose.to_dict()


def test_there_are_an_image_for_cpus_and_one_for_gpus() -> None:
    assert [path.suffix for path in CONTAINERFILES] == [".cpu", ".cuda"]


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_the_linter_finds_nothing_in_a_containerfile(path: Path) -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"

    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")


def test_the_linter_is_one_that_finds_things(tmp_path: Path) -> None:
    bad = tmp_path / "Containerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp && pip install torch\n")
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"

    done = subprocess.run([hadolint, bad], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert {"DL3007", "DL3013", "DL3003"} <= set(re.findall(r"DL\d+", done.stdout))


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_an_image_is_pinned_and_runs_without_root(path: Path) -> None:
    steps = steps_of(path)

    bases = [words for name, words in steps if name == "FROM"]
    assert all(re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+\S*", base) for base in bases), bases
    users = [words for name, words in steps if name == "USER"]
    assert users[-1].isdigit() and int(users[-1]) >= 1000
    assert [name for name, _ in steps].index("USER") < [name for name, _ in steps].index("ENTRYPOINT")
    for name, words in steps:
        if name == "ARG" and "==" not in words:
            assert words == "PIP_EXTRA_INDEX_URL=", f"{words}: a version without a pin"
        for source in words.split()[:-1] if name == "COPY" else []:
            assert (ROOT / source).exists(), source


def test_every_pin_is_one_that_the_project_allows_and_none_is_missing() -> None:
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    pinned = {need.name: str(need.specifier)[2:] for need in map(Requirement, (x for x in lines if x[0] != "#"))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    wanted = [*project["dependencies"], *(need for extra in ("lora", "router") for need in _extra(project, extra))]
    for need in map(Requirement, wanted):
        version = pinned.get(canonicalize_name(need.name))
        assert version is not None, f"{need.name} has no pin: run scripts/pin_dependencies.py"
        assert need.specifier.contains(version), f"{need.name}=={version} is not {need.specifier}"


def _extra(project: dict[str, Any], name: str) -> list[str]:
    return project["optional-dependencies"][name]


def test_the_containers_of_the_compose_file_are_confined() -> None:
    for name, service in composed()["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["init"] is True, name
        assert "privileged" not in service and "ports" not in service, name
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file(), name


def test_the_commands_of_the_compose_file_are_ours() -> None:
    for name, service in composed()["services"].items():
        words = [str(word) for word in service["command"]]
        known, _settings = build_parser().parse_known_args(words)
        mounted = {entry.partition(":")[2].partition(":")[0]: entry.partition(":")[0] for entry in service["volumes"]}
        configs = [config for config in known.configs if not config.startswith("--")]
        for config in configs[:1]:
            source = DEPLOY / mounted[config] if config in mounted else ROOT / config
            assert source.is_file(), f"{name}: {config}"


def test_the_compose_parser_is_one_that_refuses() -> None:
    with pytest.raises(ValueError, match="imagee"):
        PyCompose.from_yaml("services:\n  a:\n    imagee: x\n")


def test_what_is_no_part_of_an_image_stays_out_of_it() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()

    assert {".git", ".venv", ".venv-vllm", "runs", "build"} <= set(ignored)
