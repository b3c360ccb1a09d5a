"""The words of `counterpoint plan`; what it does is imported when it does it."""

from __future__ import annotations

import argparse

from services.wire.errors import EXIT_DONE

PLAN_HELP = """\
Shows what `counterpoint run` would start: processes, nodes, GPUs, ranks, ports, lengths, memory, disk, and the commits
that --resume would find. Starts nothing, and writes nothing but what --write names.
--explain prints every value of the configuration and where it came from; --json prints the plan for programs.

  counterpoint plan configs/cluster/split_node.toml --model.path FOLDER
  counterpoint plan configs/cluster/split_node.toml --model.path FOLDER --write job    and the job's script
"""


def add_plan_words(parser: argparse.ArgumentParser) -> None:
    """Those of `plan`."""
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="TOML files, later ones win")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.add_argument("--explain", action="store_true", help="every value and where it came from")
    parser.add_argument("--write", metavar="DIR", help="plan.json, the resolved TOML and a job's script, into a folder")


def plan_command(args: argparse.Namespace, settings: list[str]) -> int:
    """Carry out `plan`."""
    return show_plan(args.configs, settings, as_json=args.json, explain=args.explain, write=args.write)


def show_plan(
    configs: list[str],
    settings: list[str],
    *,
    as_json: bool = False,
    explain: bool = False,
    write: str | None = None,
) -> int:
    """Print the plan of a run, or where its values came from.

    Args:
        configs: TOML files.
        settings: Words of settings on top of them.
        as_json: For programs.
        explain: The values, in the place of the plan.
        write: A folder that gets the plan, the resolved configuration and, of a job, its script.
    """
    from services.config.layers import parse_overrides
    from services.config.resolve import resolve
    from services.launch.disk import refuse_where_no_commit_fits
    from services.launch.show_plan import print_explanation, print_plan

    resolved = resolve(configs, parse_overrides(settings))
    if resolved.config.deployment.kind == "local":  # a job may be planned far from its disk: there it is a note
        refuse_where_no_commit_fits(resolved)
    if explain:
        print_explanation(resolved, as_json=as_json)
    if not explain or write is not None:
        print_plan(resolved.config, as_json=as_json, write=write, quiet=explain)
    return EXIT_DONE
