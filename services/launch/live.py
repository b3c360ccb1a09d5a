"""What a person sees while a run is on: one live panel on a terminal, one line every few seconds elsewhere.

Notable:
- Polls the orchestrator's `GET /status` from a thread of its own; the supervisor's loop never waits for it.
- An alarm is one line of its own, once; the log and `events.jsonl` have it too.
- While the orchestrator does not answer yet, the panel says so instead of showing old numbers.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.launch.planner import Plan
from services.launch.rows import sparkline
from services.runtime.auth import Token, run_token

LINE_INTERVAL_S = 5.0
_POLL_S = 0.5
_DEADLINE_S = 2.0


class StatusPoller:
    """Keeps the newest status of the orchestrator; one daemon thread."""

    def __init__(self, url: str, token: Token | None = None) -> None:
        headers = {"Authorization": token.header()} if token is not None else {}
        self._request = urllib.request.Request(f"{url}/status", headers=headers)  # noqa: S310 - our own page
        self._status: dict[str, Any] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="status", daemon=True)
        self._thread.start()

    @property
    def status(self) -> dict[str, Any] | None:
        """The last answer; None while there is none."""
        return self._status

    def close(self) -> None:
        """Stop polling; the thread ends by itself."""
        self._stop.set()

    def _poll(self) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever the proxy settings
        while not self._stop.is_set():
            try:
                with opener.open(self._request, timeout=_DEADLINE_S) as reply:
                    self._status = json.loads(reply.read())
            except (OSError, ValueError):
                pass  # not up yet, or just gone: the supervisor sees exits, this only shows numbers
            self._stop.wait(_POLL_S)


class LiveView:
    """Shows a run on the terminal; implements the supervisor's view."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._live: Live | None = None
        self._poller: StatusPoller | None = None
        self._title = ""
        self._started = time.monotonic()
        self._next_line = 0.0
        self._last_line = ""
        self._alarms_said: set[tuple[str, int]] = set()

    def say(self, message: str) -> None:
        """Print one line, above the panel while there is one."""
        self._console.print(message, markup=False, soft_wrap=True)

    def begin(self, plan: Plan) -> None:
        """Start to show the run."""
        self._title = plan.context.dir
        self._started = time.monotonic()
        groups = ", ".join(f"{p.name} x{p.num_ranks}" if p.num_ranks > 1 else p.name for p in plan.processes)
        self.say(f"started {groups}; logs in {plan.context.dir}/logs")
        self._poller = StatusPoller(plan.context.orchestrator_url, run_token(plan.context.token_file))
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._panel)
            self._live.start()

    def tick(self) -> None:
        """Print alarms that are new and, where there is no terminal, a line when it is time."""
        if self._poller is None:
            return
        self._say_alarms(self._poller.status)
        if self._live is not None or time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + LINE_INTERVAL_S
        line = status_line(self._poller.status)
        if line != self._last_line:
            self.say(f"[{time.monotonic() - self._started:5.0f} s] {line}")
            self._last_line = line

    def end(self) -> None:
        """Leave the terminal as it was; may be called twice."""
        if self._poller is not None:
            self._say_alarms(self._poller.status)
            self._poller.close()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say_alarms(self, status: dict[str, Any] | None) -> None:
        for alarm in (status or {}).get("alarms") or []:
            key = (alarm["name"], alarm["step"])
            if key not in self._alarms_said:
                self._alarms_said.add(key)
                self.say(f"ALARM {alarm['name']} at step {alarm['step']}: {alarm['text']}")

    def _panel(self) -> Panel:
        status = self._poller.status if self._poller is not None else None
        elapsed = f"{time.monotonic() - self._started:.0f} s"
        return Panel(status_table(status), title=self._title, subtitle=elapsed, title_align="left")


def status_line(status: dict[str, Any] | None) -> str:
    """One line of text for a status."""
    if status is None:
        return "processes are starting"
    parts = [f"step {status.get('step', 0)}/{status.get('max_steps', '?')}"]
    for label, key in (("reward", "reward_mean"), ("EV", "explained_variance"), ("staleness", "staleness")):
        if isinstance(status.get(key), int | float):
            parts.append(f"{label} {status[key]:.3f}")
    rates = status.get("tokens_per_s") or {}
    if rates:
        parts.append("tok/s " + " ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    waits = [f"{name} waits for {what}" for name, what in (status.get("waiting_for") or {}).items() if what]
    return " | ".join(parts + waits)


def status_table(status: dict[str, Any] | None) -> Group | Text:
    """The inside of the live panel."""
    if status is None:
        return Text("processes are starting ...", style="dim")
    numbers = Table.grid(padding=(0, 3))
    numbers.add_row(
        f"[bold]step[/] {status.get('step', 0)} / {status.get('max_steps', '?')}",
        f"[bold]reward[/] {_number(status.get('reward_mean'))}",
        f"[bold]explained variance[/] {_number(status.get('explained_variance'))}",
        f"[bold]staleness[/] {_number(status.get('staleness'), 2)}",
    )
    processes = Table.grid(padding=(0, 3))
    rates, waits = status.get("tokens_per_s") or {}, status.get("waiting_for") or {}
    for name in dict.fromkeys([*rates, *waits]):
        rate = f"{rates[name]:,.0f} tokens/s" if name in rates else ""
        wait = f"waits for {waits[name]}" if waits.get(name) else ""
        processes.add_row(Text(name, style="cyan"), Text(rate, justify="right"), Text(wait, style="dim"))
    curve = Text(sparkline(status.get("recent_rewards") or [], width=60), style="green")
    return Group(numbers, curve, processes)


def _number(value: Any, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"
