"""Tokens: made once, readable by their owner alone, never shown."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.runtime.auth import Token, check_listener, grid_key, is_loopback, make_secrets, read_token, run_token
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


# ---------------------------------------------------------------------------------------------------------------------
# A run's own secrets


def test_a_run_has_two_secrets_of_mode_0600_that_are_new_at_every_start(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    seen: set[str] = set()
    for _ in range(3):
        make_secrets(str(token_file))
        files = sorted(path.name for path in tmp_path.iterdir())
        assert files == ["grid.key", "token"]
        for name in files:
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
            text = (tmp_path / name).read_text().strip()
            assert len(text) == 43  # 32 bytes in base64
            seen.add(text)
    assert len(seen) == 6
    token, key = run_token(str(token_file)), grid_key(str(token_file))
    assert token is not None and key is not None
    assert not token.matches(key.header().encode())


def test_what_an_earlier_start_handed_out_opens_nothing_any_more(tmp_path: Path) -> None:
    path = str(tmp_path / "token")
    make_secrets(path)
    old = read_token(path)
    make_secrets(path)
    assert not read_token(path).matches(old.header().encode())


def test_a_secret_is_made_anew_even_where_a_readable_file_or_a_link_was_planted(tmp_path: Path) -> None:
    planted = tmp_path / "elsewhere"
    planted.write_text("a-known-secret-of-some-length\n")
    (tmp_path / "token").symlink_to(planted)
    (tmp_path / "grid.key").write_text("a-known-secret-of-some-length\n")
    make_secrets(str(tmp_path / "token"))
    assert planted.read_text() == "a-known-secret-of-some-length\n"
    for name in ("token", "grid.key"):
        assert not (tmp_path / name).is_symlink()
        assert "known" not in (tmp_path / name).read_text()


def test_without_a_token_file_nothing_is_made_and_nobody_asks(tmp_path: Path) -> None:
    make_secrets(None)
    assert run_token(None) is None and grid_key(None) is None and not list(tmp_path.iterdir())


def test_secrets_that_cannot_be_made_are_named() -> None:
    with pytest.raises(CannotWrite, match="token"):
        make_secrets("/dev/null/token")


@pytest.mark.parametrize("name", ["token", "grid.key"])
def test_a_secret_that_others_may_read_is_refused_with_exit_code_78(tmp_path: Path, name: str) -> None:
    make_secrets(str(tmp_path / "token"))
    (tmp_path / name).chmod(0o644)
    with pytest.raises(ConfigError, match="mode 644: others may read it; fix: chmod 600") as caught:
        run_token(str(tmp_path / "token"))
        grid_key(str(tmp_path / "token"))
    assert caught.value.exit_code == 78


def test_derived_secrets_are_hmac_sha256_of_their_purpose() -> None:
    """RFC 4231, test case 2: key "Jefe"."""
    derived = Token("Jefe").derive("what do ya want for nothing?")
    assert derived.hex() == "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("127.evil.example", False),
     ("localhost.example", False), ("10.0.0.1", False), ("0.0.0.0", False), ("::", False), ("", False)],
)  # fmt: skip
def test_loopback_is_judged_by_the_address_and_not_by_how_it_begins(host: str, is_local: bool) -> None:
    assert is_loopback(host) == is_local


@pytest.mark.parametrize(
    ("host", "is_guarded", "cause"),
    [
        ("127.0.0.1", False, None),
        ("10.0.0.1", True, None),
        ("10.0.0.1", False, "can be reached from other machines, and there is no token"),
        ("0.0.0.0", True, "is every interface"),
        ("::", True, "is every interface"),
        ("239.0.0.1", True, "is every interface"),
        ("node7", True, "is no IP address"),
        ("", True, "is no IP address"),
        ("*", True, "is no IP address"),
    ],
)
def test_a_listener_is_on_loopback_or_asks_and_is_never_on_every_interface(host, is_guarded, cause) -> None:
    if cause is None:
        check_listener(host, "a page", is_guarded=is_guarded)
        return
    with pytest.raises(ConfigError, match=cause):
        check_listener(host, "a page", is_guarded=is_guarded)


def test_a_traceback_in_the_log_shows_no_secret_that_a_variable_held(tmp_path: Path) -> None:
    """In a process of its own: the logger is one for all."""
    make_secrets(str(tmp_path / "token"))
    program = """
import sys
from pathlib import Path
from loguru import logger
from services.runtime.auth import run_token
from services.runtime.logs import setup_logging
run_dir = Path(sys.argv[1])
setup_logging("x", run_dir)
def ask(headers):
    raise RuntimeError("no answer")
try:
    token = run_token(str(run_dir / "token"))
    ask({"Authorization": token.header()})
except RuntimeError as error:
    logger.opt(exception=error).error("asking failed with {}", token)
"""
    root = str(Path(__file__).parents[4])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
    )
    text = (tmp_path / "logs" / "x.log").read_text() + done.stderr + done.stdout
    assert done.returncode == 0 and "RuntimeError: no answer" in text and "Token(...)" in text
    assert (tmp_path / "token").read_text().strip() not in text
