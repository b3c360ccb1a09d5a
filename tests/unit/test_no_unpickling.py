"""No module of ours can execute bytes that it was sent: no pickle, no eval, no shell. Read from the source itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("services", "orchestrator", "value_service", "policy_trainer")
MODULES = {
    "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "multiprocessing", "pickle", "shelve", "xmlrpc",
    "torch.multiprocessing", "torch.distributed.rpc",
}  # fmt: skip
"""They load pickles, or send objects as such."""
CALLS = {
    "eval", "exec", "compile", "recv_pyobj", "send_pyobj", "read_pickle", "to_pickle", "os.system", "os.popen",
    "yaml.load", "yaml.unsafe_load", "torch.load", "torch.save", "torch.hub.load",
}  # fmt: skip
"""By the whole dotted name, or by its last word where that is the whole entry."""
OBJECT_COLLECTIVES = ("_object", "_object_list")
FLAGS = {"allow_pickle", "shell", "trust_remote_code"}
"""Keyword arguments that may not be true."""
READERS = {"services/training/checkpoint.py"}
"""Who reads torch's distributed checkpoints, whose metadata is pickle: SECURITY.md, rule 7."""


def files() -> list[Path]:
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(found) > 100
    return found


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(source: str) -> Iterator[str]:
    """What a source does that could execute bytes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {name.name}" for name in node.names if _is_listed(name.name))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{name.name}" for name in node.names)]
            yield from (f"from {module} import" for name in names if _is_listed(name) or name in CALLS)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            last = name.rpartition(".")[2] or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
            builtin_only = {"eval", "exec", "compile"}  # `model.eval()` and `re.compile()` are other things
            if name in CALLS or (last in CALLS - builtin_only):
                yield f"{name or last}()"
            if last.endswith(OBJECT_COLLECTIVES) and not last.startswith("_"):
                yield f"{name or last}()"
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in FLAGS and not is_off:
                    yield f"{keyword.arg}="


def _is_listed(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in MODULES)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_of_ours_can_unpickle_or_evaluate(package: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {danger}"
        for path in files()
        if path.relative_to(ROOT).parts[0] == package
        for danger in dangers(path.read_text())
    }
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.multiprocessing as mp",
        "from torch import load",
        "from torch.distributed import rpc",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "torch.save(model, path)",
        "socket.recv_pyobj()",
        "dist.broadcast_object_list(x)",
        "torch.distributed.all_gather_object(x, y)",
        "self.group.gather_object(x)",
        "yaml.load(text)",
        "eval(text)",
        "exec(text)",
        "np.load(file, allow_pickle=True)",
        "np.load(file, allow_pickle=flag)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "(a or b).recv_pyobj()",
    ],
)
def test_the_test_finds_what_it_looks_for(line: str) -> None:
    assert list(dangers(line)), line


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "re.compile(pattern)",
        "np.load(file, allow_pickle=False)",
        "safetensors.torch.load_file(path)",
        "_object(a=1)",
        "json.load(file)",
    ],
)
def test_the_test_leaves_the_harmless_alone(line: str) -> None:
    assert not list(dangers(line)), line


def test_distributed_checkpoints_are_read_where_their_digests_were_verified_and_nowhere_else() -> None:
    readers = set()
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name) and dotted(node).rpartition(".")[2] == "FileSystemReader":
                readers.add(str(path.relative_to(ROOT)))
    assert readers == READERS


def test_the_linter_has_the_same_opinion() -> None:
    """Ruff's rules about pickle, eval, yaml and shells are on for the packages."""
    source = (
        "import pickle\nimport subprocess\n\nimport yaml\n\npickle.loads(b'')\neval('1')\nyaml.load('')\n"
        "subprocess.run('x', shell=True)\n"
    )
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--stdin-filename", "services/x.py"]
    done = subprocess.run([*command, "-"], input=source, capture_output=True, text=True, cwd=ROOT)
    for rule in ("S301", "S307", "S506", "S602"):
        assert f" {rule} " in done.stdout, (rule, done.stdout)
