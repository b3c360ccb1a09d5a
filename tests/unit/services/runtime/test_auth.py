"""Tokens: made once, readable by their owner alone, never shown."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.runtime.auth import Token, read_token
from services.wire.errors import CannotWrite, ConfigError


def test_a_missing_file_is_made_with_a_token_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "token"
    token = read_token(path, make=True)
    assert path.stat().st_mode & 0o777 == 0o600 and len(path.read_text().strip()) >= 43
    assert token.matches(read_token(path).header().encode())
    assert [file.name for file in path.parent.iterdir()] == ["token"]


def test_processes_that_come_at_once_end_with_one_token(tmp_path: Path) -> None:
    path = tmp_path / "token"

    def child() -> str:
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, read_token(path, make=True).header().encode())
            os._exit(0)
        os.wait()
        return os.read(read, 200).decode()

    with ThreadPoolExecutor(1):
        assert len({child() for _ in range(4)} | {f"Bearer {path.read_text().strip()}"}) == 1


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef0123")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod 600"):
        read_token(path)


@pytest.mark.parametrize("text", ["", "short", "with space in the middle of it", "x" * 600, "é" * 20])
def test_a_file_without_a_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as refused:
        read_token(path)
    assert not text or text not in str(refused.value)


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token file .*/nothing cannot be read"):
        read_token(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path)
    with pytest.raises(CannotWrite):
        read_token(Path("/dev/null/token"), make=True)


def test_a_token_matches_its_own_header_only_and_does_not_show_itself() -> None:
    token = Token("0123456789abcdef")
    assert token.matches(b"Bearer 0123456789abcdef") and token.matches(b"bearer 0123456789abcdef")
    for wrong in (None, b"", b"Bearer", b"Bearer ", b"Bearer 0123456789abcdeg", b"Basic 0123456789abcdef",
                  b"0123456789abcdef", b"Bearer 0123456789abcdef "):  # fmt: skip
        assert not token.matches(wrong)
    assert "0123" not in repr(token) + str(token) + f"{token!r}"
