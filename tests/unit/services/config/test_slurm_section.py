"""`[slurm]`: what no job script takes is told by key, before there is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.config.slurm import SlurmConfig, slurm_problems
from tests.conftest import ROOT


def problems_of(grace_s: float = 540.0, **keys) -> list[tuple[str, str, str]]:
    found = slurm_problems(SlurmConfig(**keys), shutdown_grace_s=grace_s)
    return [(".".join(map(str, path)), what, fix) for path, what, fix, _ in found]


def test_the_defaults_and_what_sites_usually_say_are_fine(tmp_path: Path) -> None:
    template = tmp_path / "own.j2"
    template.write_text("")
    assert problems_of() == []
    assert not problems_of(
        account="nlp@gpu",
        partition="a100,h100",
        qos="high",
        time="2-00:00:00",
        nodelist="n[1-4,7]",
        exclude="n5",
        memory="200G",
        extra=[
            "#SBATCH --reservation=maint",
            "#SBATCH --gres=gpu:a100:8",
            "#SBATCH -C a100&ib",
            "#SBATCH --hint=nomultithread",
        ],
        setup=["source /etc/profile", 'export NCCL_IB_HCA="mlx5"; ulimit -n 65536 && echo $HOSTNAME'],
        modules=["cuda/12.8", "gcc/13.2"],
        venv="~/envs/train",
        container=["apptainer", "exec", "--nv", "--bind=/data:/data", "/images/train.sif"],
        container_python="/opt/venv/bin/python",
        srun=["--container-image=/images/train.sqsh", "--container-mounts=/data:/data"],
        template=str(template),
    )


@pytest.mark.parametrize(
    "hostile",
    ["a b", "a;rm -rf /", "$(id)", "`id`", "a\n#SBATCH --wrap=id", "a'b", 'a"b', "a|b", "a>b", "a\\b", "a#b", "a\x00b"],
)
@pytest.mark.parametrize(
    "key", ["account", "partition", "qos", "time", "nodelist", "exclude", "memory", "venv", "container_python"]
)
def test_a_value_with_characters_of_a_shell_is_refused_by_its_key(key: str, hostile: str) -> None:
    (found,) = problems_of(**{key: hostile})
    assert found[0] == f"slurm.{key}" and repr(hostile) in found[1]


@pytest.mark.parametrize("hostile", ["x y\nid", "--a=$(id)", "`id`", "a;id", "'", '"', "a b"])
@pytest.mark.parametrize("key", ["modules", "container", "srun"])
def test_an_entry_with_characters_of_a_shell_is_refused_with_its_place(key: str, hostile: str) -> None:
    (found,) = problems_of(**{key: ["good", hostile]})
    assert found[0] == f"slurm.{key}" and found[1].startswith(f"entry 2, {hostile!r}")


@pytest.mark.parametrize(
    "line",
    ["--time=1", "#SBATCH", "#SBATCH --a=1\nid", "#SBATCH --a=1 --b=2", "#SBATCH --wrap='id'", "id #SBATCH --a", ""],
)
def test_an_extra_line_is_one_option_of_sbatch(line: str) -> None:
    (found,) = problems_of(extra=[line])
    assert found[0] == "slurm.extra"


def test_a_setup_line_is_shell_but_one_line() -> None:
    assert problems_of(setup=["x=$(id); echo 'a b' | cat > /dev/null"]) == []
    (found,) = problems_of(setup=["true\nid"])
    assert found[0] == "slurm.setup"


def test_a_template_that_is_not_there_is_told() -> None:
    (found,) = problems_of(template="/no/such/file.j2")
    assert found[:2] == ("slurm.template", "there is no file /no/such/file.j2")


def test_the_lead_must_hold_the_time_that_a_run_takes_to_end() -> None:
    assert problems_of(grace_s=599.0) == []
    (found,) = problems_of(grace_s=600.0)
    assert found[0] == "slurm.signal_lead_s" and "600 s before its end, and the run may take 600 s" in found[1]


def test_the_page_for_users_lists_every_key_and_no_other() -> None:
    page = (ROOT / "docs" / "slurm.md").read_text()
    table = page.partition("## Every key")[2].partition("\n\nValues pass")[0]
    listed = [
        key
        for line in table.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert sorted(listed) == sorted(SlurmConfig.model_fields)
