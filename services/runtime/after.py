"""A short wait before a process of a run: for others that must have loaded first; then the process, in its place.

Usage: `python -m services.runtime.after URL[,URL...] --deadline-s N -- argv...`

Notable:
- A URL is another process's `/readyz`. Any answer whose `state` is not "loading" will do, whatever its status code: who
  shares its devices goes to sleep once it has loaded, and is not ready then.
- The command takes this process's place: its pid, its session and its death with the guard stay as they are.
- Nothing is caught while it waits: SIGTERM and SIGINT end it at once.
- Nothing heavy is imported: the process that comes then has its own to load.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from services.wire.errors import EXIT_DEPENDENCY_LOST, EXIT_USAGE

MODULE = ("-m", "services.runtime.after")
LOADING = "loading"
POLL_S = 0.25
SAY_INTERVAL_S = 30.0
_PROBE_DEADLINE_S = 5.0
_MAX_REPLY_BYTES = 65_536


def main(words: Sequence[str]) -> int:
    """Wait, then become the command of `words`; the exit code where that cannot be."""
    parsed = _parse(words)
    if parsed is None:
        sys.stderr.write("usage: python -m services.runtime.after URL[,URL...] --deadline-s N -- argv...\n")
        return EXIT_USAGE
    urls, deadline_s, command = parsed
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    late = wait_for(urls, deadline_s)
    if late is not None:
        sys.stderr.write(f"{late} had not loaded after {deadline_s:g} s\n")
        return EXIT_DEPENDENCY_LOST
    try:
        os.execvp(command[0], command)  # noqa: S606 - an argv list of the planner, no shell
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
    return EXIT_DEPENDENCY_LOST


def after(python: str, urls: Sequence[str], deadline_s: float, argv: Sequence[str]) -> list[str]:
    """The command that waits before `argv`.

    Args:
        python: An interpreter that finds this module.
        urls: Whom to wait for.
        deadline_s: How long at most.
        argv: What comes then.
    """
    return [python, *MODULE, ",".join(urls), "--deadline-s", f"{deadline_s:g}", "--", *argv]


def split_wait(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command as the words that wait, which may be none, and those that come then."""
    if tuple(argv[1:3]) != MODULE:
        return [], list(argv)
    start = argv.index("--") + 1
    return list(argv[:start]), list(argv[start:])


def wait_for(urls: Sequence[str], deadline_s: float) -> str | None:
    """Wait until every process has loaded.

    Args:
        urls: Their `/readyz`.
        deadline_s: For all of them together.

    Returns:
        The one that had not by then; None where all have.
    """
    started = time.monotonic()
    next_word = started + SAY_INTERVAL_S
    for url in urls:
        while not has_loaded(url):
            now = time.monotonic()
            if now - started > deadline_s:
                return url
            if now > next_word:
                next_word = now + SAY_INTERVAL_S
                sys.stderr.write(f"waiting for {url} to load ({now - started:.0f} s)\n")
            time.sleep(POLL_S)
    return None


def has_loaded(url: str) -> bool:
    """Whether a process says a state other than "loading"; nobody there, or no such answer, is not yet."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_PROBE_DEADLINE_S)
    try:
        connection.request("GET", where.path)
        answer: Any = json.loads(connection.getresponse().read(_MAX_REPLY_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
    state = answer.get("state") if isinstance(answer, dict) else None
    return isinstance(state, str) and state != LOADING


def _parse(words: Sequence[str]) -> tuple[list[str], float, list[str]] | None:
    """URLs, deadline and command."""
    if len(words) < 5 or words[1] != "--deadline-s" or words[3] != "--":
        return None
    urls = [url for url in words[0].split(",") if url]
    try:
        deadline_s = float(words[2])
    except ValueError:
        return None
    is_plain = all(urlsplit(url).scheme == "http" and urlsplit(url).hostname for url in urls)
    return (urls, deadline_s, list(words[4:])) if urls and is_plain else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
