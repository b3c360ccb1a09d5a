"""Where the scoring API may listen, and what it asks of strangers.

Notable:
- Beyond loopback there is no listener without a token, and none on all interfaces at all: a name that somebody else
  resolves is no address either.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from services.config.machine import can_bind
from services.config.train import ValueConfig

Problem = tuple[str, str, str, tuple[str, ...]]
"""Key of `[value]`, what is wrong, the fix, and further keys of `[value]` that it depends on."""


def listener_problems(value: ValueConfig) -> Iterator[Problem]:
    """Why a value service cannot listen as it is told."""
    try:
        address = ipaddress.ip_address(value.host)
    except ValueError:
        yield "host", f"{value.host!r} is no IP address", 'give one of this machine, such as "127.0.0.1"', ()
        return
    if address.is_unspecified or address.is_multicast:
        yield "host", f"{value.host} is every interface", "give the address of the one that clients come by", ()
        return
    if not address.is_loopback and value.token_file is None:
        what = f"{value.host} can be reached from other machines, and there is no token"
        yield "host", what, 'give value.token_file (it is made where there is none), or "127.0.0.1"', ("token_file",)
    if not can_bind(0, value.host):
        yield "host", f"{value.host} is no address of this machine", "give one that is", ()
    yield from _folders(value)


def _folders(value: ValueConfig) -> Iterator[Problem]:
    for root in value.load_roots:
        if not Path(root).is_dir():
            yield "load_roots", f"there is no folder {root}", "make it, or delete the entry", ()


def url_of(host: str, port: int) -> str:
    """http://host:port; an IPv6 address in brackets."""
    return f"http://{host_port(host, port)}"


def host_port(host: str, port: int) -> str:
    """host:port; an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
