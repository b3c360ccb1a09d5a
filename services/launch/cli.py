"""The command line: `counterpoint run | plan | report | export | make-tiny`.

Notable:
- Heavy imports happen inside the commands: `counterpoint --help` answers at once.
- Settings (`--section.key value`) are taken out before argparse looks, so that any key works and none is declared
  twice; the resolver knows which keys exist.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from services.launch.plan_cli import PLAN_HELP, add_plan_words, plan_command, show_plan
from services.launch.pretrain_cli import (
    PRETRAIN_HELP,
    RECORD_HELP,
    add_pretrain_words,
    add_record_words,
    pretrain_command,
    record_command,
)
from services.wire.errors import EXIT_DONE, ConfigError, CounterpointError, UsageError

SETTINGS_HELP = """\
settings:
  --section.key value     set one value, e.g. --orchestrator.max_steps 20 --policy.optim.lr 3e-4
  --env.0.max_turns 4     ... in the first [[env]] table
  --value none            drop a table (or a key: it falls back to its default)

Files are merged left to right, then settings are applied. Unknown keys are errors with a suggestion.
"""
RUN_HELP = """\
Trains as CONFIG says: starts inference, value service, policy trainer and orchestrator, shows one live status,
and ends them all when the last step is done or the first of them fails.

  counterpoint run configs/demo/sao.toml
  counterpoint run configs/demo/sao.toml --run.name second --orchestrator.max_steps 20
  counterpoint run configs/demo/sao.toml --algorithm.type grpo --orchestrator.group_size 8 --value none
  counterpoint run configs/demo/sao.toml --resume           go on from the newest commit
  counterpoint run big.toml --render-only job               deployment.kind = "slurm": the job script, not submitted

Ctrl-C or SIGTERM: the run commits after the step under way and ends with 75; a second one ends it at once.
"""
REPORT_HELP = """\
Prints the curves of finished, failed or running runs, and draws them into RUN_DIR/report.png. Several runs are drawn
into one picture, beside each other's lines, in the first one's directory (or --out FILE).
"""
EXPORT_HELP = """\
Writes the policy or the critic of a run as a Hugging Face folder, from its newest commit or that of --step. A policy
can be a `model.path`, a critic the `value.init_from` of another run. Where transformers has a class for token
classification, a critic is one: its output at a position is the value of the state after that token. What its
numbers mean is in counterpoint.json. A run without a commit gives the policy's newest snapshot.

  counterpoint export runs/sao --role policy models/sao
  counterpoint export runs/sao --role critic --step 100 models/sao-critic
"""
REPLAY_HELP = """\
Trains again from the rollouts that a run recorded, without inference: another algorithm, loss, critic or layout on the
same data. Values are scored anew, in the recorded order. Settings go on top of the run's own configuration; what made
the rollouts (model, environments, batches, temperature) cannot change. RUN_DIR is only read.

  counterpoint replay runs/sao
  counterpoint replay runs/sao --run.dir runs/sao-ppo --algorithm.type ppo
"""
TINY_HELP = """\
Makes the 0.43 M-parameter byte-level Llama and warm-starts it on one task by a few supervised steps; the same command
makes the same weights. `model.path = "tiny:add"` does this by itself.
"""
SERVE_HELP = """\
Starts the value service alone: no policy, no inference, no orchestrator. CONFIG needs [model] and [value];
value.init_from names an exported critic. Prints where it listens once it is ready, and serves until Ctrl-C or SIGTERM
(exit code 130 or 143).

  counterpoint serve-value configs/demo/sao.toml --value.port 8000
  counterpoint serve-value critic.toml --value.host 10.0.0.5 --value.token_file critic.token
"""
SCORE_HELP = """\
Asks a running value service for the values of every row of a JSON lines file: {"token_ids": [...]} becomes the same
row with "values" (one a token, that of the state before it), "bootstrap_value" (after the last) and "critic_step". Rows
that cannot be scored are told as file:line before anything is.

  counterpoint score --url http://127.0.0.1:8000 rollouts.jsonl --out values.jsonl
"""
TOP_HELP = """\
Reinforcement learning for language-model agents with a critic of its own: policy, critic, inference and orchestrator
are separate processes.

  counterpoint plan configs/demo/sao.toml      what would start
  counterpoint run configs/demo/sao.toml       start it
  counterpoint report runs/sao                 what it did

exit codes: 0 done, 64 usage, 69 dependency lost, 70 bug, 73 cannot write, 75 stopped and resumable, 78 configuration,
130/143 stopped by a signal before the first commit
"""

_TOP_LEVEL = frozenset(
    {
        "seed",
        "run",
        "model",
        "algorithm",
        "orchestrator",
        "env",
        "eval",
        "policy",
        "value",
        "inference",
        "deployment",
        "slurm",
        "runtime",
        "checkpoint",
        "monitor",
    }
)
"""Names of the configuration's top level: a test compares them with the schema."""


_WITH_SETTINGS = (["run"], ["plan"], ["replay"], ["serve-value"], ["pretrain-value"], ["record"])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def main(argv: list[str] | None = None) -> int:
    """Entry point of `counterpoint`.

    Args:
        argv: Words after the program's name; None takes the process's own.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        settings, rest = split_settings(words) if words[:1] in _WITH_SETTINGS else ([], words)
        args = build_parser().parse_args(rest)
        command: Callable[[argparse.Namespace, list[str]], int] = args.function
        return command(args, settings)
    except ConfigError as error:
        for problem in error.problems:
            sys.stderr.write(f"{problem}\n")
        num = len(error.problems)
        sys.stderr.write(f"counterpoint: {num} problem{'s' if num != 1 else ''} in the configuration\n")
        return error.exit_code
    except CounterpointError as error:
        sys.stderr.write(f"counterpoint: {error}\n")
        return error.exit_code
    except BrokenPipeError:  # `counterpoint plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE


def split_settings(words: list[str]) -> tuple[list[str], list[str]]:
    """Separate `--section.key value` pairs (and `--section none`, `--seed 3`) from the other words.

    Raises:
        UsageError: A setting without its value.
    """
    settings: list[str] = []
    rest: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        key, equals, _ = word[2:].partition("=")
        position += 1
        if not word.startswith("--") or not ("." in key or key in _TOP_LEVEL):
            rest.append(word)
            continue
        settings.append(word)
        if not equals:
            if position >= len(words):
                raise UsageError(f"{word} needs a value")
            settings.append(words[position])
            position += 1
    return settings, rest


def build_parser() -> argparse.ArgumentParser:
    """The parser of everything but settings."""
    parser = _Parser(prog="counterpoint", description=TOP_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    run = _command(commands, "run", "train as a configuration says", RUN_HELP, _run, SETTINGS_HELP)
    run.add_argument("configs", nargs="+", metavar="CONFIG", help="TOML files, later ones win")
    run.add_argument("--overwrite", action="store_true", help="remove an earlier run in the same directory")
    run.add_argument("--resume", action="store_true", help="go on from the newest commit in the same directory")
    run.add_argument(
        "--allow-fallback", action="store_true", help="with --resume: an older commit where the newest is damaged"
    )
    run.add_argument("--dry-run", action="store_true", help="the same as `counterpoint plan`")
    run.add_argument(
        "--render-only", metavar="DIR", help='with deployment.kind = "slurm": write the job, submit nothing'
    )

    plan = _command(commands, "plan", "show what would start", PLAN_HELP, plan_command, SETTINGS_HELP)
    add_plan_words(plan)

    report = _command(commands, "report", "curves of runs, as text and PNG", REPORT_HELP, _report)
    report.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="run directories")
    report.add_argument("--out", metavar="FILE", help="where to write the picture")

    export = _command(commands, "export", "a trained model as a Hugging Face folder", EXPORT_HELP, _export)
    export.add_argument("run_dir", metavar="RUN_DIR", help="run directory")
    export.add_argument("--role", required=True, choices=["policy", "critic"], help="which of the two models")
    export.add_argument("--step", type=int, metavar="N", help="commit after N finished steps (default: the newest)")
    export.add_argument("dir", metavar="DIR", help="folder to make")

    replay = _command(commands, "replay", "train again from recorded rollouts", REPLAY_HELP, _replay, SETTINGS_HELP)
    replay.add_argument("run_dir", metavar="RUN_DIR", help="directory of the recorded run")
    replay.add_argument("--overwrite", action="store_true", help="remove an earlier replay in the same directory")
    replay.add_argument("--resume", action="store_true", help="go on from the last commit of an earlier replay")
    replay.add_argument("--allow-fallback", action="store_true", help="... or an older one where that is damaged")

    pretrain = _command(
        commands, "pretrain-value", "train a critic on files", PRETRAIN_HELP, pretrain_command, SETTINGS_HELP
    )
    add_pretrain_words(pretrain)
    record = _command(commands, "record", "rollouts as such files", RECORD_HELP, record_command, SETTINGS_HELP)
    add_record_words(record)

    serve = _command(commands, "serve-value", "the value service alone", SERVE_HELP, _serve_value, SETTINGS_HELP)
    serve.add_argument("configs", nargs="+", metavar="CONFIG", help="TOML files, later ones win")
    serve.add_argument("--overwrite", action="store_true", help="remove a run in the same directory")

    score = _command(commands, "score", "values for the rows of a file", SCORE_HELP, _score)
    score.add_argument("file", metavar="FILE.jsonl", help="rows with token_ids")
    score.add_argument("--url", required=True, metavar="URL", help="http://host:port of a value service")
    score.add_argument("--out", metavar="FILE", help="where to write (default: standard output)")
    score.add_argument("--token-file", metavar="FILE", help="file of the token that the service asks for")
    score.add_argument("--deadline-s", type=float, default=300.0, metavar="S", help="of one request (default: 300)")

    tiny = _command(commands, "make-tiny", "make the tiny model", TINY_HELP, _make_tiny)
    tiny.add_argument("dir", metavar="DIR", help="folder to make")
    tiny.add_argument("--task", default="add", help="task of the warm start: add, reverse, guess (default: add)")
    tiny.add_argument("--seed", type=int, default=0, help="seed of weights and examples (default: 0)")
    return parser


def _command(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    short: str,
    text: str,
    function: Callable[[argparse.Namespace, list[str]], int],
    epilog: str = "",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=short, description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(function=function)
    return parser


def _run(args: argparse.Namespace, settings: list[str]) -> int:
    if args.dry_run:
        return show_plan(args.configs, settings)
    from services.config.layers import parse_overrides
    from services.config.resolve import resolve
    from services.launch.disk import refuse_where_no_commit_fits
    from services.launch.live import LiveView
    from services.launch.report import summary
    from services.launch.resume import resume_run, run_with_restarts
    from services.launch.supervisor import run_dir_of
    from services.runtime.roots import check_root

    check_root()
    if args.resume and args.overwrite:
        raise UsageError("--resume goes on with what --overwrite would remove: give one of them")
    resolved = resolve(args.configs, parse_overrides(settings))
    refuse_where_no_commit_fits(resolved)
    config = resolved.config
    if args.render_only or config.deployment.kind == "slurm":
        from services.launch.slurm import run_on_slurm

        how = {"overwrite": args.overwrite, "resume": args.resume, "allow_fallback": args.allow_fallback}
        return run_on_slurm(config, **how, render_only=args.render_only)
    if args.resume:
        code = resume_run(config, LiveView(), allow_fallback=args.allow_fallback)
    else:
        code = run_with_restarts(config, LiveView(), overwrite=args.overwrite)
    if code == EXIT_DONE:
        sys.stdout.write(summary(run_dir_of(config)) + "\n")
    return code


def _replay(args: argparse.Namespace, settings: list[str]) -> int:
    from pathlib import Path

    from services.config.layers import parse_overrides
    from services.launch.live import LiveView
    from services.launch.replay import replay
    from services.launch.report import summary
    from services.launch.supervisor import run_dir_of
    from services.runtime.roots import check_root

    check_root()
    overrides = parse_overrides(settings)
    how = {"overwrite": args.overwrite, "resume": args.resume, "allow_fallback": args.allow_fallback}
    code, config = replay(Path(args.run_dir), overrides, LiveView(), **how)
    if code == EXIT_DONE:
        sys.stdout.write(summary(run_dir_of(config)) + "\n")
    return code


def _serve_value(args: argparse.Namespace, settings: list[str]) -> int:
    from services.config.layers import parse_overrides
    from services.launch.serve_value import serve_value
    from services.runtime.roots import check_root

    check_root()

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()  # whoever waits for it reads a pipe

    return serve_value(args.configs, parse_overrides(settings), overwrite=args.overwrite, say=say)


def _score(args: argparse.Namespace, _settings: list[str]) -> int:
    from pathlib import Path

    from services.launch.score import score_file
    from services.runtime.auth import read_token

    token = read_token(args.token_file) if args.token_file else None
    out = Path(args.out) if args.out else None
    score_file(args.url, Path(args.file), out, token=token, deadline_s=args.deadline_s)
    return EXIT_DONE


def _report(args: argparse.Namespace, _settings: list[str]) -> int:
    from pathlib import Path

    from services.launch.report import draw, text_report

    run_dirs = [Path(name) for name in args.run_dirs]
    sys.stdout.write("\n\n".join(text_report(run_dir) for run_dir in run_dirs) + "\n")
    target = Path(args.out) if args.out else run_dirs[0] / "report.png"
    draw(run_dirs, target)
    sys.stdout.write(f"picture: {target}\n")
    return EXIT_DONE


def _export(args: argparse.Namespace, _settings: list[str]) -> int:
    from pathlib import Path

    from services.launch.export import MODULE, export_words

    return _in_child(MODULE, export_words(Path(args.run_dir), args.role, args.step, Path(args.dir)))


def _make_tiny(args: argparse.Namespace, _settings: list[str]) -> int:
    from services.config.model_path import TINY_TASKS

    if args.task not in TINY_TASKS:
        raise UsageError(f"--task {args.task}: choose from {', '.join(TINY_TASKS)}")
    return _in_child("services.model.tiny", [args.dir, "--task", args.task, "--seed", str(args.seed)])


def _in_child(module: str, words: list[str]) -> int:
    """Run a module that imports torch; its exit code."""
    import subprocess

    from services.launch.planner import Site
    from services.runtime.roots import project_root

    argv = [sys.executable, "-m", module, *words]
    path = Site(project_root(), pythonpath=os.environ.get("PYTHONPATH", "")).search_path
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(argv, env=env, check=False).returncode
