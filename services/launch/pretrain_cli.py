"""The words of `counterpoint pretrain-value` and `counterpoint record`; what they do is imported when they do it."""

from __future__ import annotations

import argparse
import sys

from services.wire.errors import EXIT_DONE

PRETRAIN_HELP = """\
Trains the critic alone, on files of recorded rollouts (`[value.pretrain]`), and measures it on prompts that it has not
seen. Ends with RUN_DIR/critic, a folder for `value.init_from`. Ctrl-C or SIGTERM: it commits after the update under way
and ends with 75; --resume goes on in the same order. RUN_DIR is runs/<run.name>-pretrain unless run.dir is given.

  counterpoint pretrain-value config.toml
  counterpoint pretrain-value config.toml --value.pretrain.epochs 2 --resume
"""
RECORD_HELP = """\
Rolls out the configured environments with the configured model and writes what came of it as rows for
`counterpoint pretrain-value`: RUN_DIR/rows/rows.jsonl and manifest.json. Starts inference, and no trainer. RUN_DIR is
runs/<run.name>-record unless run.dir is given.

  counterpoint record config.toml --rows 2000
  counterpoint record config.toml --rows 500 --suffixes 4      and 4 new ends for each, from one of its turns on
  counterpoint record config.toml --model.path models/other --policy-id other --run.dir runs/other
"""


def add_pretrain_words(parser: argparse.ArgumentParser) -> None:
    """Those of `pretrain-value`."""
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="TOML files, later ones win")
    parser.add_argument("--overwrite", action="store_true", help="remove an earlier run in the same directory")
    parser.add_argument("--resume", action="store_true", help="go on from the newest commit in the same directory")


def add_record_words(parser: argparse.ArgumentParser) -> None:
    """Those of `record`."""
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="TOML files, later ones win")
    parser.add_argument("--rows", type=int, metavar="N", help="rollouts (default: max_steps * batch_size)")
    parser.add_argument("--suffixes", type=int, default=0, metavar="N", help="continuations of each rollout's prefix")
    parser.add_argument("--policy-id", metavar="NAME", help="who samples (default: run.name)")
    parser.add_argument("--overwrite", action="store_true", help="remove an earlier recording in the same directory")


def pretrain_command(args: argparse.Namespace, settings: list[str]) -> int:
    """Carry out `pretrain-value`."""
    from services.config.layers import parse_overrides
    from services.launch.pretrain import pretrain_value, pretraining_summary
    from services.launch.progress import ProgressView
    from services.runtime.roots import check_root
    from services.wire.errors import UsageError

    check_root()
    if args.resume and args.overwrite:
        raise UsageError("--resume goes on with what --overwrite would remove: give one of them")
    how = {"overwrite": args.overwrite, "resume": args.resume}
    code, run_dir = pretrain_value(args.configs, parse_overrides(settings), ProgressView(), **how)
    if code == EXIT_DONE:
        sys.stdout.write(pretraining_summary(run_dir) + "\n")
    return code


def record_command(args: argparse.Namespace, settings: list[str]) -> int:
    """Carry out `record`."""
    from services.config.layers import parse_overrides
    from services.launch.progress import ProgressView
    from services.launch.record import record
    from services.runtime.roots import check_root

    check_root()
    code, folder = record(
        args.configs,
        parse_overrides(settings),
        ProgressView(),
        rows=args.rows,
        suffixes=args.suffixes,
        policy_id=args.policy_id,
        overwrite=args.overwrite,
    )
    if code == EXIT_DONE:
        sys.stdout.write(f"wrote {folder}/rows.jsonl, for value.pretrain.files\n")
    return code
