"""A whole run that asks for its token everywhere, as somebody on the same machine meets it: read SECURITY.md."""

from __future__ import annotations

import ipaddress
from collections import Counter

import pytest

from tests.runs import Finished
from tests.spies import ROUTES, Seen


@pytest.fixture(scope="module")
def seen(watched_sao: tuple[Finished, Seen]) -> Seen:
    run, seen = watched_sao
    assert run.code == 0, run.output[-3000:]
    assert not seen.error, seen.error
    return seen


def test_a_run_with_its_token_asked_everywhere_ends_as_any_other(sao: Finished, seen: Seen) -> None:
    assert len(sao.rows("rollout")) == len(sao.rows("critic")) == len(sao.rows("policy")) == 4
    assert sao.context["token_file"] == str(sao.dir / "token")
    assert seen.modes == {"token": 0o600, "grid.key": 0o600}
    assert len({len(seen.token), len(seen.grid_key)}) == 1 and len(seen.token) == 43


@pytest.mark.parametrize("who", ["nobody", "stranger"])
def test_without_the_token_every_route_but_health_answers_401(seen: Seen, who: str) -> None:
    for listener, (health, *closed) in ROUTES.items():
        assert seen.answers[listener, health, who] == 200, listener
        for route in closed:
            assert seen.answers[listener, route, who] == 401, (listener, route)


def test_with_the_token_they_answer(seen: Seen) -> None:
    told = {key: status for key, status in seen.answers.items() if key[2] == "friend"}
    assert len(told) >= 8 and set(told.values()) == {200}


def test_a_stranger_who_calls_himself_a_rank_gets_no_grid(seen: Seen) -> None:
    assert seen.grid_replies == []


def test_no_secret_is_on_a_command_line_or_in_an_environment(seen: Seen) -> None:
    assert len(seen.commands) > 8 and all(seen.commands.values())
    for words in seen.commands.values():
        assert seen.token not in words and seen.grid_key not in words


def test_no_secret_is_in_any_file_of_the_run_or_in_its_output(sao: Finished, seen: Seen) -> None:
    files = [path for path in sao.dir.rglob("*") if path.is_file() and path.name not in ("token", "grid.key")]
    names = {path.name for path in files}
    assert {"run.json", "config.resolved.toml", "metrics.jsonl", "events.jsonl", "orchestrator.log"} <= names
    for path in files:
        content = path.read_bytes()
        assert seen.token.encode() not in content and seen.grid_key.encode() not in content, path
    assert seen.token not in sao.output and seen.grid_key not in sao.output


def test_every_socket_listens_on_loopback_but_for_the_stores_of_torch(sao: Finished, seen: Seen) -> None:
    """The stated exception: torch's stores take every interface, whatever address they are given."""
    ours = {port_of(url) for url in urls_of(sao.context)}
    assert ours <= {socket.port for socket in seen.sockets}
    for socket in seen.sockets:
        is_store = "torch.distributed.run" in socket.command and socket.port not in ours
        assert is_store or ipaddress.ip_address(socket.address).is_loopback, socket


def urls_of(context: dict) -> list[str]:
    names = ("policy_url", "value_url", "orchestrator_url", "policy_grid_url", "critic_grid_url")
    return [*context["inference_urls"], *(context[name] for name in names)]


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def test_torchs_stores_are_two_of_each_agent_and_nothing_else(seen: Seen) -> None:
    """What SECURITY.md says the network must close."""
    wide = [socket for socket in seen.sockets if not ipaddress.ip_address(socket.address).is_loopback]
    agents = Counter(socket.pid for socket in wide if "torch.distributed.run" in socket.command)
    assert sum(agents.values()) == len(wide)
    assert sorted(agents.values()) == [2, 2]
