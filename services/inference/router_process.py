"""`vllm-router` for a run with a token: the router's own command, which also asks its callers for the token.

Notable:
- The router can have a caller's token checked by somebody else, an option that its own command line does not offer.
  The guard in front of it checks (`GET /token`); the token itself is not known here.
- It remembers each answer for its whole life, and takes a checker that cannot be reached for a no. So it is started
  only once the guard is there.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import time
from typing import Any
from urllib.parse import urlsplit

POLL_S = 0.1
DEADLINE_S = 300.0


def wait_for(url: str, deadline_s: float = DEADLINE_S) -> bool:
    """Wait until somebody answers there, whatever they say; whether they did."""
    address = urlsplit(url)
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5)
        try:
            connection.request("GET", address.path)
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            time.sleep(POLL_S)
        else:
            return True
        finally:
            connection.close()
    return False


def main() -> None:
    """Entry point: `--token-check-url URL`, then the router's own arguments."""
    parser = argparse.ArgumentParser(prog="python -m services.inference.router_process", description=__doc__)
    parser.add_argument("--token-check-url", required=True, help="answers GET with 200 where a token is right")
    ours, rest = parser.parse_known_args()
    if not wait_for(ours.token_check_url):
        sys.exit(f"nobody answers at {ours.token_check_url}")
    from vllm_router.launch_router import parse_router_args  # its core takes a moment to load
    from vllm_router.router import Router

    args: Any = parse_router_args(rest)
    args.api_key_validation_urls = [ours.token_check_url]
    Router.from_args(args).start()


if __name__ == "__main__":
    main()
