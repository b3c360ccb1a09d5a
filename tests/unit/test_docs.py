"""What the documents name exists, what they show works: files, links, commands, keys, metrics, exit codes, examples."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.rollout import Sampling, roll_out
from orchestrator.tasks import Task
from orchestrator.threads import Threads
from services.config.orchestrator import EnvConfig, EvalConfig
from services.config.resolve import resolve
from services.config.validate import known_keys
from services.inference.client import Generation
from services.launch.cli import build_parser
from services.launch.report import PANELS
from services.wire import errors
from services.wire.samples import StopReason, VersionSpan, validate_branch

ROOT = Path(__file__).parents[2]
README, METRICS, ENVIRONMENTS = ROOT / "README.md", ROOT / "docs" / "metrics.md", ROOT / "docs" / "environments.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "ASSUMPTIONS.md",
    METRICS,
    ENVIRONMENTS,
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in ("metrics.md", "environments.md")),
]
PROCESSES = ("orchestrator", "value_service", "policy_trainer")
FOLDERS = (*PROCESSES, "services", "configs", "docs", "scripts", "benchmarks", "tests", "deploy", "slurm")
TO_BE_WRITTEN = {"orchestrator/environments/largest.py"}
"""The page that the example tells the reader to add."""
METRIC = re.compile(r"(reward|rollout|credit|evpo|value|policy|eval|time|tokens_per_s|alarm|checkpoint)(/[a-z_*]+)+")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


FENCED = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.S | re.M)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language; "" for those without a name."""
    return [text for name, text in FENCED.findall(page.read_text()) if name == language]


def spans(page: Path) -> list[str]:
    """Inline code, and the lines of fenced blocks that are not a program."""
    inline = re.findall(r"`([^`\n]+)`", FENCED.sub("", page.read_text()))
    return inline + "".join(blocks(page, "")).splitlines()


# ---------------------------------------------------------------------------------------------------------------------
# Files


def headings_of(page: Path) -> set[str]:
    """Its headings as links name them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, heading = target.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), target
        assert not heading or heading in headings_of(there), target


@each_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    for span in spans(page):
        for name in re.findall(rf"(?<![\w/.])((?:{'|'.join(FOLDERS)})/[\w./<>-]*)", span):
            if name not in TO_BE_WRITTEN:
                assert list(ROOT.glob(name.replace("<name>", "*").rstrip("/"))), name


def test_the_tree_of_the_readme_is_the_tree_on_disk() -> None:
    (block,) = [block for block in blocks(README, "") if block.startswith("Makefile")]
    listed: list[str] = []
    folders: list[str] = []
    for line in block.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name]
        listed.append("".join(folders))
        path = ROOT / listed[-1]
        assert path.is_dir() if name.endswith("/") else path.is_file(), listed[-1]
    inner = {path.parent for top in FOLDERS for path in (ROOT / top).glob("*/*.py")}
    expected = {f"{folder.relative_to(ROOT)}/" for folder in inner if "__pycache__" not in folder.parts}
    for process in PROCESSES:
        mains = {"__init__.py", "main.py"}
        expected |= {str(file.relative_to(ROOT)) for file in (ROOT / process).glob("*.py") if file.name not in mains}
    assert expected <= {*listed}, expected - {*listed}


def test_the_picture_is_readable_in_light_and_dark() -> None:
    """It brings its own background, so it never depends on the page's."""
    picture = (ROOT / "docs" / "flow.svg").read_text()
    assert "prefers-color-scheme: dark" in picture and 'class="card"' in picture
    assert "docs/flow.svg" in README.read_text()


@each_page
def test_pages_name_no_host_and_no_path_of_a_machine(page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r"https?://(?!127\.0\.0\.1)", text)
    assert not re.findall(r"(?<![\w.])/(?:home|work|root|tmp|usr)/", text)


def test_the_table_of_what_is_tested_is_that_of_the_tests() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "tested.py", "--check"], check=False)

    assert done.returncode == 0, "docs/tested.md is out of date: `make format` writes it"


def test_every_file_of_tests_says_what_holds() -> None:
    rows = re.findall(
        r"^\| (test_\S+|\S+/test_\S+) \| (.*) \| (\d+) \|$", (ROOT / "docs" / "tested.md").read_text(), re.M
    )

    assert len(rows) > 100
    assert [name for name, text, number in rows if not text or number == "0"] == []


# ---------------------------------------------------------------------------------------------------------------------
# Commands and keys


def commands() -> dict[str, set[str]]:
    """Options of each command."""
    actions = build_parser()._actions
    (found,) = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    return {name: set(parser._option_string_actions) for name, parser in found.choices.items()}


@each_page
def test_every_command_and_option_that_is_named_exists(page: Path) -> None:
    known, keys = commands(), known_keys()
    for span in spans(page):
        for command, rest in re.findall(r"\bcounterpoint (?!--)([a-z-]+)(.*)", span):
            assert command in known, span
            for option in re.findall(r"--([\w.-]+)", rest):
                assert f"--{option}" in known[command] or option in keys, span


def test_the_readme_lists_every_command() -> None:
    listed = re.findall(r"^\| `counterpoint ([a-z-]+)", README.read_text(), re.M)
    assert listed == list(commands())


@each_page
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {target for span in spans(page) for target in re.findall(r"\bmake ([a-z][a-z-]*)", span)}
    assert named <= targets, named - targets


@each_page
def test_every_key_that_is_named_exists(page: Path) -> None:
    keys = known_keys()
    tables = "|".join({key for key in keys if "." not in key})
    for span in spans(page):
        for key in re.findall(rf"(?:^|--)((?:{tables})(?:\.[a-z_]+)+)", span):
            if Path(key).suffix not in {".json", ".toml", ".py"}:
                assert key in keys, key


def test_the_configuration_of_the_readme_can_run(tmp_path: Path) -> None:
    (block,) = blocks(README, "toml")
    path = tmp_path / "readme.toml"
    path.write_text(block)
    config = resolve([path]).config
    assert config.value is not None and config.value.optim.lr == 1e-3 and config.policy.optim.lr == 2e-4
    assert config.deployment.num_value_gpus == 2


def test_the_exit_codes_of_the_readme_are_those_of_the_source() -> None:
    listed = {int(n) for row in re.findall(r"^\| ([\d, ]+) \|", README.read_text(), re.M) for n in row.split(",")}
    defined = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert listed == defined | {130, 143}


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


def source_files() -> list[Path]:
    """Where rows of metrics are made."""
    return [file for top in (*PROCESSES, "services/training") for file in sorted((ROOT / top).rglob("*.py"))]


def pattern_of(node: ast.JoinedStr, variables: dict[str, str]) -> str:
    """An f-string with `*` for what it formats, or the f-string a variable holds."""
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        else:
            value = part.value if isinstance(part, ast.FormattedValue) else part
            parts.append(variables.get(value.id, "*") if isinstance(value, ast.Name) else "*")
    return "".join(parts)


def metrics_of_the_source() -> set[str]:
    """Every metric that the source spells out, `*` for parts chosen at run time."""
    found: set[str] = set()
    for file in source_files():
        tree = ast.parse(file.read_text())
        variables: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.JoinedStr):
                variables |= {t.id: pattern_of(node.value, {}) for t in node.targets if isinstance(t, ast.Name)}
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        texts |= {pattern_of(node, variables) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)}
        found |= {text for text in texts - {*variables.values()} if METRIC.fullmatch(text)}
    return found


def metrics_of(page: Path, *, first_column: bool) -> set[str]:
    """Every metric that a page names, `*` for `<...>`."""
    text = page.read_text()
    if first_column:
        text = "\n".join(row.split("|")[1] for row in text.splitlines() if row.startswith("| `"))
    names = {re.sub(r"<[a-z]+>", "*", name) for name in re.findall(r"`([^`\n]+)`", text)}
    return {name for name in names if METRIC.fullmatch(name)}


def test_the_metrics_page_lists_exactly_the_metrics_of_the_source() -> None:
    source, page = metrics_of_the_source(), metrics_of(METRICS, first_column=True)
    assert len(source) > 40
    assert source - page == set(), "not documented"
    assert page - source == set(), "documented, but nobody writes it"


def test_every_metric_of_the_readme_and_of_the_report_is_on_the_metrics_page() -> None:
    page = metrics_of(METRICS, first_column=True)
    assert len(metrics_of(README, first_column=False)) > 10
    assert metrics_of(README, first_column=False) <= page
    assert {name for _, _, name in PANELS} <= page


def test_stop_reasons_and_causes_of_drops_on_the_metrics_page_are_those_of_the_source() -> None:
    text = METRICS.read_text()
    (row,) = re.findall(r"^\| `rollout/stop/<reason>` \|(.*)$", text, re.M)
    assert re.findall(r"`([a-z_]+)`", row) == [str(reason) for reason in StopReason]
    (table,) = re.findall(r"^\| cause \|.*?(?=\n\n)", text, re.S | re.M)
    listed = {cause for row in table.splitlines() for cause in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    causes: set[Any] = set()
    for node in (node for file in source_files() for node in ast.walk(ast.parse(file.read_text()))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("drop", "_reject")
        ):
            causes |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
        if isinstance(node, ast.FunctionDef) and node.name == "cause_of_invalid":
            returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            causes |= {value.value for value in returned if isinstance(value, ast.Constant) and value.value}
    assert listed == causes


# ---------------------------------------------------------------------------------------------------------------------
# The example of an environment


@pytest.fixture
def example() -> dict[str, Any]:
    """Everything that the page's Python blocks define; running them checks their assertions."""
    names: dict[str, Any] = {"__name__": "example"}
    for block in blocks(ENVIRONMENTS, "python"):
        exec(compile(block, str(ENVIRONMENTS), "exec"), names)
    return names


class Script:
    """An engine that says given texts, one a turn."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self._turns = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]

    async def generate(self, token_ids: list[int], **_: Any) -> Generation:
        said = self._turns.pop(0)
        return Generation(said, [-0.5] * len(said), [VersionSpan(0, len(said), 3)], "stop")


def test_the_example_says_what_it_asserts(example: dict[str, Any]) -> None:
    assert example["environment"].num_tasks == 1000
    assert example["environment"].start(7, seed=0).cut() == 0.0


async def test_the_example_is_driven_like_any_environment(example: dict[str, Any]) -> None:
    """Scenario: a wrong answer, then the right one. Result: reward 1, and the reply between them does not train."""
    environment, tokenizer = example["environment"], example["tokenizer"]
    config = EnvConfig(type="largest", max_turns=3, max_turn_tokens=4, max_trace_tokens=32)
    engine = Script(tokenizer, "4", "7")
    threads = Threads(1, name="environment")
    trace = await roll_out(Task(0, environment, config, 472), 0, engine, Sampling(1.0, 0, 10.0), threads)
    threads.close()
    (branch,) = trace.branches
    validate_branch(branch)
    assert (trace.reward, trace.stop_reason, trace.num_turns) == (1.0, StopReason.TERMINATED, 2)
    edges = np.flatnonzero(np.diff(branch.action_mask.astype(int), prepend=0, append=0))
    said = [branch.token_ids[start:end].tolist() for start, end in pairwise([0, *edges[:-1]])]
    assert [tokenizer.decode([i for i in ids if i < 256]) for ids in said] == ["472>", "4", "no:"]


def test_the_example_of_its_tables_fits_the_schema() -> None:
    import tomllib

    (block,) = blocks(ENVIRONMENTS, "toml")
    tables = tomllib.loads(block)
    assert EnvConfig.model_validate(tables["env"][0]).args == {"num_digits": 3}
    assert EvalConfig.model_validate(tables["eval"][0]).max_turns == 1
