"""Where the scoring API may listen, and what a value service that is alone needs of a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config.listener import listener_problems, url_of
from services.config.resolve import resolve
from services.config.schema import from_toml, to_toml
from services.config.train import ValueConfig
from services.wire.errors import ConfigError


def problems(**keys: object) -> list[str]:
    return [f"{key}: {what}" for key, what, _, _ in listener_problems(ValueConfig.model_validate(keys))]


def test_loopback_needs_no_token() -> None:
    assert problems() == problems(host="127.0.0.2") == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "224.0.0.1"])
def test_all_interfaces_are_refused_with_a_token_too(host: str) -> None:
    assert problems(host=host, token_file="token") == [f"host: {host} is every interface"]


def test_beyond_loopback_there_is_no_listener_without_a_token() -> None:
    """198.51.100.7 is an address for documentation, which no machine has."""
    assert problems(host="198.51.100.7") == [
        "host: 198.51.100.7 can be reached from other machines, and there is no token",
        "host: 198.51.100.7 is no address of this machine",
    ]
    assert problems(host="198.51.100.7", token_file="t") == ["host: 198.51.100.7 is no address of this machine"]


@pytest.mark.parametrize("host", ["localhost", "", "127.0.0.1:80", "example.org"])
def test_names_are_no_addresses(host: str) -> None:
    assert problems(host=host) == [f"host: {host!r} is no IP address"]


def test_roots_must_be_there(tmp_path: Path) -> None:
    assert problems(load_roots=[str(tmp_path)]) == []
    assert problems(load_roots=[str(tmp_path / "none")]) == [f"load_roots: there is no folder {tmp_path / 'none'}"]


def test_addresses_become_urls() -> None:
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80" and url_of("::1", 80) == "http://[::1]:80"


def resolved(tmp_path: Path, text: str):
    path = tmp_path / "critic.toml"
    path.write_text(text)
    return resolve([path], only_critic=True).config


def test_a_critic_alone_needs_a_model_and_a_value_table(tmp_path: Path) -> None:
    config = resolved(tmp_path, '[model]\npath = "tiny:add"\n[value]\n[value.model]\nseq_len = 8\n')
    assert config.value is not None and config.value.model.seq_len == 8
    assert from_toml(to_toml(config)) == config
    with pytest.raises(ConfigError, match=r"critic.toml:1: value: there is no critic to serve"):
        resolved(tmp_path, '[model]\npath = "tiny:add"\n')


def test_what_a_critic_alone_does_not_read_is_not_checked_and_what_it_reads_is(tmp_path: Path) -> None:
    """A batch that is no multiple of its group is the run's problem; ranks that cp does not divide are the critic's."""
    text = '[model]\npath = "tiny:add"\n[value]\n[orchestrator]\nbatch_size = 7\ngroup_size = 2\n'
    assert resolved(tmp_path, text).orchestrator.batch_size == 7
    with pytest.raises(ConfigError, match=r"value.model.cp: 2 does not divide deployment.num_value_gpus = 1"):
        resolved(tmp_path, text + "[value.model]\ncp = 2\n")
    with pytest.raises(ConfigError, match=r"value.load_roots"):
        resolved(tmp_path, text.replace("[value]", '[value]\nload_roots = ["nowhere"]'))
