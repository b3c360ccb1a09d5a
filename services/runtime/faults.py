"""Points at which a test can kill a process of ours: where timing cannot be reached from outside.

Notable:
- `point(name)` does nothing unless the environment names it: COUNTERPOINT_FAULT="commit:before-rename:kill", or
  "commit:before-rename@3:kill" for the third time that this process passes it.
- An armed point says so loudly before it strikes. "kill" is SIGKILL to this process alone: no handler runs, nothing is
  flushed, and what it started is left to whoever watches it.
"""

from __future__ import annotations

import os
import re
import signal

from loguru import logger

from services.wire.errors import UsageError

FAULT_VARIABLE = "COUNTERPOINT_FAULT"

_FORM = re.compile(r"(?P<name>[^@]+?)(?:@(?P<passing>[1-9]\d*))?:kill")
_passed: dict[str, int] = {}


def point(name: str) -> None:
    """Die here if the environment asks for it.

    Args:
        name: What has just been done or is next, such as "commit:before-rename".

    Raises:
        UsageError: The variable is set to something that is no fault.
    """
    armed = os.environ.get(FAULT_VARIABLE)
    if armed is None:
        return
    fault = _FORM.fullmatch(armed)
    if fault is None:
        raise UsageError(f"{FAULT_VARIABLE}={armed!r} is not NAME:kill or NAME@N:kill")
    if fault["name"] != name:
        return
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] == int(fault["passing"] or 1):
        logger.critical("injected fault at {}: SIGKILL to process {}", name, os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)
