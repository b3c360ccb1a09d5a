"""`deployment.kind = "slurm"`: a job script rendered from the plan, and its submission.

Notable:
- The script only starts the launcher on the job's first node (`services.launch.slurm_job`) and passes signals on; what
  the launcher will start is in it as comments, with node0, node1, ... for nodes and the names of ports for ports.
- Values reach the script through an allow-list of characters (`services.config.slurm`) and `shlex.quote`.
- The run directory is made here, on the login node, so that a used one is refused before anything waits in a queue.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from services.config.context import Host
from services.config.ports import port_names
from services.config.schema import Config, to_toml
from services.config.slurm import slurm_problems
from services.launch.models import MODELS_DIR, model_source
from services.launch.placement import place
from services.launch.planner import LOOPBACK, Plan, ProcessPlan, Site, plan
from services.launch.rundir import create_run_dir, hold_run_dir
from services.launch.supervisor import run_dir_of, site_here
from services.runtime.commits import Commits
from services.runtime.durable import write_atomic
from services.wire.errors import EXIT_DONE, ConfigError, DependencyLost, UsageError

SCRIPT = "job.sbatch"
JOB_FILE = "job.json"
CONFIG_FILE = "config.resolved.toml"
LOG_PATTERN = "slurm-%j.log"
TEMPLATE = Path("slurm") / "job.sbatch.j2"
_FIRST_PORT = 60001
"""Stands for the first port's name while commands are rendered for people: above every port that is chosen."""
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.,:+@/=~-]+")


@dataclass(frozen=True)
class Job:
    """What a script is rendered for, beside the configuration."""

    run_dir: Path
    cwd: Path
    """Where relative paths of the configuration begin."""
    site: Site
    folder: Path
    """Where SLURM's log of the job goes."""
    config_file: Path | None = None
    """Makes the run directory in the job, from this file; None = it has been made."""
    resume: bool = False
    allow_fallback: bool = False

    @property
    def launcher(self) -> list[str]:
        """The command that the script starts."""
        words = [self.site.python, "-m", "services.launch.slurm_job", "--run-dir", str(self.run_dir)]
        words += ["--config", str(self.config_file)] if self.config_file is not None else []
        words += ["--resume"] if self.resume else []
        return [*words, "--allow-fallback"] if self.allow_fallback else words


def job_site(config: Config) -> Site:
    """This checkout, and the interpreter of the job."""
    site = site_here()
    venv = config.slurm.venv
    return replace(site, python=str(Path(venv).expanduser().absolute() / "bin" / "python")) if venv else site


def say_line(line: str) -> None:
    """Print one line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run_on_slurm(
    config: Config,
    *,
    say: Callable[[str], None] = say_line,
    overwrite: bool = False,
    resume: bool = False,
    allow_fallback: bool = False,
    render_only: str | None = None,
) -> int:
    """Render the job's script and submit it.

    Args:
        config: The resolved configuration.
        say: Prints one line.
        overwrite: Remove an earlier run in the same directory.
        resume: The job goes on from the newest commit.
        allow_fallback: ... or from an older one where that is damaged.
        render_only: Write script and resolved configuration into this folder instead, and submit nothing.

    Returns:
        0.

    Raises:
        UsageError: The run is no job.
        ConfigError: The job cannot be made, or the run directory is in use.
        DependencyLost: sbatch refused it.
    """
    if config.deployment.kind != "slurm":
        raise UsageError('--render-only is for deployment.kind = "slurm"')
    run_dir, cwd, site = run_dir_of(config), Path.cwd(), job_site(config)
    if render_only is not None:
        folder = Path(render_only).resolve()
        _write(config, Job(run_dir, cwd, site, folder, folder / CONFIG_FILE, resume, allow_fallback))
        say(f"script: {folder / SCRIPT} (nothing was submitted)")
        return EXIT_DONE
    job = Job(run_dir, cwd, site, run_dir, None, resume, allow_fallback)
    render(config, job)  # what is wrong is told before anything is touched
    _refuse_where_there_is_no_slurm()
    with hold_run_dir(run_dir):
        job_id = _submit_run(config, job, overwrite=overwrite)
    log = run_dir / LOG_PATTERN.replace("%j", job_id)
    say(f"job:     {job_id}")
    say(f"script:  {run_dir / SCRIPT}")
    say(f"log:     {log}")
    say(f"follow:  tail -F {log}")
    say(f"state:   squeue -j {job_id}")
    say(f"end it:  scancel --batch --signal=TERM {job_id}   (commits first; without these words it ends at once)")
    return EXIT_DONE


def _write(config: Config, job: Job) -> None:
    """Configuration and script, in the job's folder."""
    script = render(config, job)
    job.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(job.folder / CONFIG_FILE, to_toml(config))
    write_atomic(job.folder / SCRIPT, script)


def _submit_run(config: Config, job: Job, *, overwrite: bool) -> str:
    """Make the run directory, or go on in it, and submit; the job's id."""
    run_dir = job.run_dir
    _refuse_where_at_work(run_dir)
    if not job.resume:
        create_run_dir(run_dir, config, overwrite=overwrite)
    elif not Commits(run_dir / "checkpoints").steps():
        raise ConfigError([f"run.dir: {run_dir} has no commit to go on from; fix: start anew with --overwrite"])
    _write(config, job)
    try:
        job_id = submit(run_dir / SCRIPT)
    except DependencyLost:
        if not job.resume:
            shutil.rmtree(run_dir)  # out of the way of the next try
        raise
    write_atomic(run_dir / JOB_FILE, json.dumps({"job_id": job_id}) + "\n")
    return job_id


def render(config: Config, job: Job) -> str:
    """The job's script.

    Args:
        config: The resolved configuration.
        job: Where, and what for.

    Raises:
        ConfigError: A value cannot be part of a script; every one at once.
    """
    from jinja2 import Environment, StrictUndefined, TemplateError

    section = config.slurm
    problems = [
        f"{'.'.join(map(str, path))}: {what}; fix: {fix}"
        for path, what, fix, _ in slurm_problems(section, shutdown_grace_s=config.runtime.shutdown_grace_s)
    ]
    for key, path in (("run.dir", job.run_dir), ("working directory", job.cwd), ("folder of the script", job.folder)):
        if not _PLAIN_PATH.fullmatch(str(path)):
            problems.append(f"{key}: {str(path)!r} has characters that no job script takes; fix: choose another")
    if problems:
        raise ConfigError(problems)
    template = Path(section.template) if section.template else job.site.root / TEMPLATE
    environment = Environment(  # noqa: S701 - a shell script; values are quoted by the filter
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quote"] = lambda text: shlex.quote(str(text))
    layout = symbolic_plan(config, job)
    try:
        return environment.from_string(template.read_text()).render(
            run_name=config.run.name,
            template_name=template.name,
            head=list(_head(config, job, len(layout.hosts))),
            roles=[_shown(process, layout) for process in layout.processes],
            cwd=str(job.cwd),
            search_path=job.site.search_path,
            modules=section.modules,
            setup=section.setup,
            launcher=[shlex.quote(word) for word in job.launcher],
            requeue=section.requeue,
            config=config,
        )
    except TemplateError as error:
        raise ConfigError([f"slurm.template: {template}: {error}; fix: correct the template"]) from error


def symbolic_plan(config: Config, job: Job) -> Plan:
    """The plan with node0, node1, ... as hosts, and a number for each port that no plan has."""
    num_nodes = place(config).num_nodes
    hosts = [Host(f"node{index}", f"node{index}" if num_nodes > 1 else LOOPBACK) for index in range(num_nodes)]
    ports = {name: _FIRST_PORT + index for index, name in enumerate(port_names(config))}
    model = model_source(config.model.path, root=job.site.root, models_dir=MODELS_DIR, python=job.site.python)
    return plan(
        config,
        ports,
        hosts=hosts,
        run_dir=job.run_dir,
        run_id=config.run.name,
        epoch=1,
        model=model,
        site=job.site,
    )


def submit(script: Path) -> str:
    """Hand a script to sbatch; the job's id.

    Raises:
        DependencyLost: It refused; its words.
    """
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)  # noqa: S607
    if done.returncode:
        raise DependencyLost(f"sbatch refused {script}: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]  # "id;cluster" where there are several


def _head(config: Config, job: Job, num_nodes: int) -> Iterator[str]:
    section, deployment = config.slurm, config.deployment
    yield f"#SBATCH --job-name={config.run.name}"
    for option in ("account", "partition", "qos", "time", "nodelist", "exclude"):
        if value := getattr(section, option):
            yield f"#SBATCH --{option}={value}"
    yield f"#SBATCH --nodes={num_nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    if section.exclusive:
        yield "#SBATCH --exclusive"
    if section.memory:
        yield f"#SBATCH --mem={section.memory}"
    if deployment.device == "cuda" and section.request_gpus:
        yield f"#SBATCH --gpus-per-node={deployment.gpus_per_node}"
    yield f"#SBATCH --output={job.folder / LOG_PATTERN}"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --signal=B:USR1@{section.signal_lead_s}"
    yield "#SBATCH --requeue" if section.requeue else "#SBATCH --no-requeue"
    yield from section.extra


def _shown(process: ProcessPlan, layout: Plan) -> dict[str, str]:
    """A process as the script's comments show it: one line each, whatever is in it."""
    nodes = ", ".join(layout.hosts[node].name for node in process.nodes)
    facts = [nodes, f"{process.num_ranks} rank{'s' if process.num_ranks > 1 else ''}"]
    if process.gpus:
        facts.append(f"GPUs {','.join(map(str, process.gpus))}" + (" of each" if len(process.nodes) > 1 else ""))
    names = {str(port): name for name, port in layout.ports.items()}
    argv = process.argv[process.argv.index("--") + 1 :]  # after the words that bring it onto its nodes
    command = re.sub(r"\b6\d{4}\b", lambda found: names.get(found[0], found[0]), shlex.join(argv))
    return {"name": process.name, "where": "; ".join(facts), "command": _one_line(command)}


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _refuse_where_there_is_no_slurm() -> None:
    missing = [name for name in ("sbatch", "squeue") if shutil.which(name) is None]
    if missing:
        fix = 'run this on a login node, or give deployment.kind = "local"'
        raise ConfigError([f"deployment.kind: {' and '.join(missing)} not on this machine; fix: {fix}"])


def _refuse_where_at_work(run_dir: Path) -> None:
    """A job of this directory that is queued or running would be at work in it twice."""
    path = run_dir / JOB_FILE
    if not path.is_file():
        return
    job_id = str(json.loads(path.read_text())["job_id"])
    command = ["squeue", "-h", "-j", job_id, "-o", "%T"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    state = listed.stdout.strip()
    if listed.returncode == 0 and state:
        fix = f"wait for it, or scancel {job_id}"
        raise ConfigError([f"run.dir: job {job_id} of {run_dir} is {state}; fix: {fix}"])
