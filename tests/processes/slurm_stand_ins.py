"""Stand-ins for SLURM's commands and for the processes of a run, as small programs on PATH.

Notable:
- `srun` runs its command once on each node of `--nodelist`, as children of its own, and is what the launcher counts on:
  standard input goes to every task, a bad exit ends the others, SIGTERM is an order to kill.
- Of a role only the words after `--` are replaced: `services.launch.on_node` runs as it is.
- A role notes its start, then does what `behaviour.json` says of it and its node, or waits until it is asked to end.
"""

from __future__ import annotations

import sys
from pathlib import Path

SRUN = """
import json, os, signal, subprocess, sys, threading
words, options = sys.argv[1:], {}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
role = options["--job-name"]
if role != "ports":
    words[words.index("--") + 1 :] = [sys.executable, FOLDER + "/role.py", role]
with open(FOLDER + "/sruns", "a") as file:
    file.write(json.dumps([role, sys.argv[1:]]) + "\\n")
tasks = [
    subprocess.Popen(words, stdin=subprocess.PIPE, env=os.environ | {"SLURMD_NODENAME": node})
    for node in options["--nodelist"].split(",")
]
def end(*_):
    for task in tasks:
        task.kill()
signal.signal(signal.SIGTERM, end)
def forward():
    while said := os.read(0, 100):
        for task in tasks:
            try:
                task.stdin.write(said)
                task.stdin.flush()
            except OSError:
                pass
    for task in tasks:
        try:
            task.stdin.close()
        except OSError:
            pass
threading.Thread(target=forward, daemon=True).start()
codes = []
def wait(task):
    codes.append(task.wait())
    if codes[-1]:
        for other in tasks:
            other.terminate()
            try:
                other.stdin.close()
            except OSError:
                pass
waits = [threading.Thread(target=wait, args=[task]) for task in tasks]
for each in waits:
    each.start()
for each in waits:
    each.join()
os._exit(codes[0] if not any(codes) else next(code if code > 0 else 128 - code for code in codes if code))
"""
SCONTROL = """
import sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("\\n".join(sys.argv[3].split("+")))
else:
    print(f"NodeName={sys.argv[4]} NodeAddr=127.0.0.1 NodeHostName=x")
"""
ROLE = """
import json, os, pathlib, signal, sys, time
role, node = sys.argv[1], os.environ["SLURMD_NODENAME"]
folder = pathlib.Path(FOLDER)
def note(word):
    with open(folder / "notes", "a") as file:
        file.write(f"{word} {role} {node} {os.getpid()}\\n")
def asked(*_):
    note("asked")
    sys.exit(75 if role == "orchestrator" else 0)
signal.signal(signal.SIGTERM, asked)
note("started")
acts = json.loads((folder / "behaviour.json").read_text()).get(f"{role}@{node}")
if acts is not None:
    while (folder / "notes").read_text().count("started ") < acts.get("when_started", 0):
        time.sleep(0.05)
    while "when_file" in acts and not (folder / acts["when_file"]).exists():
        time.sleep(0.05)
    sys.exit(acts["code"])
while True:
    time.sleep(0.05)
"""


def install(folder: Path) -> Path:
    """Put the stand-ins into a folder; what to put before PATH."""
    commands = folder / "bin"
    commands.mkdir()
    programs = {"srun": SRUN, "scontrol": SCONTROL, "squeue": "", "scancel": ""}
    for name, script in programs.items():
        path = commands / name
        path.write_text(f"#!{sys.executable}\nFOLDER = {str(folder)!r}\n{script}")
        path.chmod(0o755)
    (folder / "role.py").write_text(f"FOLDER = {str(folder)!r}\n{ROLE}")
    return commands
