"""Secrets from files that only their owner can read: bearer tokens, a run's own secrets, and who may listen without.

Notable:
- A file is made with 32 random bytes where there is none; two processes that come at once end with the same token.
- A run has two secrets, new at every start: `token` is shown over HTTP, `grid.key` beside it is shown to nobody: the
  keys of the grid links are derived from it, so whoever was given the token (to ask for values, say) cannot train.
- The token itself is in no configuration, command line, log or exception: only the path of its file is.
- Comparison takes the same time wherever a wrong token begins to differ, and whatever its length.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import stat
from pathlib import Path

from services.wire.errors import CannotWrite, ConfigError

NUM_RANDOM_BYTES = 32
_GOOD = re.compile(rb"[\x21-\x7e]{16,512}")
_SCHEME = b"bearer "
GRID_KEY_FILE = "grid.key"
TOKEN_FILE_VARIABLE = "COUNTERPOINT_TOKEN_FILE"  # noqa: S105 - a name
"""Names the token's file to a process that has no run directory on its command line: vLLM."""


class Token:
    """A secret that does not show itself."""

    __slots__ = ("_digest", "_secret")

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._digest = hashlib.sha256(secret.encode()).digest()

    def __repr__(self) -> str:
        return "Token(...)"

    def header(self) -> str:
        """Value of the `Authorization` header that shows it to the service."""
        return f"Bearer {self._secret}"

    def matches(self, header: bytes | None) -> bool:
        """Whether an `Authorization` header carries this token."""
        header = header or b""
        scheme, secret = header[: len(_SCHEME)], header[len(_SCHEME) :]
        # digests are equally long, so the comparison tells nothing about either
        same = hmac.compare_digest(hashlib.sha256(secret).digest(), self._digest)
        return same and scheme.lower() == _SCHEME

    def derive(self, purpose: str) -> bytes:
        """32 bytes that tell nothing about the secret, other ones for every purpose."""
        return hmac.digest(self._secret.encode(), purpose.encode(), "sha256")


def read_token(path: Path | str, *, make: bool = False) -> Token:
    """Read a token.

    Args:
        path: Its file.
        make: Make the file where there is none.

    Raises:
        ConfigError: the file is missing, readable by others, another user's, or holds no token.
        CannotWrite: it cannot be made.
    """
    path = Path(path)
    if make and not path.exists():
        _make(path)
    try:
        with path.open("rb") as file:
            entry = os.fstat(file.fileno())
            text = file.read(1024).strip()
    except OSError as error:
        raise ConfigError([f"token file {path} cannot be read: {error.strerror}"]) from None
    if not stat.S_ISREG(entry.st_mode) or entry.st_uid != os.geteuid():
        raise ConfigError([f"token file {path} is not a regular file of this user"])
    if entry.st_mode & 0o077:
        mode = oct(stat.S_IMODE(entry.st_mode))[2:]
        raise ConfigError([f"token file {path} has mode {mode}: others may read it; fix: chmod 600 {path}"])
    if not _GOOD.fullmatch(text):
        raise ConfigError([f"token file {path} must hold one line of 16 to 512 printable characters without spaces"])
    return Token(text.decode())


def make_secrets(token_file: str | None) -> None:
    """Make a run's token and grid key anew: what an earlier start handed out opens nothing any more.

    Args:
        token_file: `RUN/token`; None = nobody asks for one.

    Raises:
        CannotWrite: they cannot be made.
    """
    if token_file is None:
        return
    for path in (Path(token_file), grid_key_file(token_file)):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CannotWrite(f"token file {path} cannot be replaced: {error.strerror}") from None
        _make(path)


def run_token(token_file: str | None) -> Token | None:
    """What listeners of a run ask for, and its clients show; None where nobody asks.

    Raises:
        ConfigError: as `read_token`.
    """
    return read_token(token_file) if token_file is not None else None


def critic_token(own_file: str | None, token_file: str | None) -> Token | None:
    """What the value service asks for, and its clients show.

    Args:
        own_file: `value.token_file`: where there is one, it takes the place of the run's.
        token_file: The run's.

    Raises:
        ConfigError, CannotWrite: as `read_token`.
    """
    return read_token(own_file, make=True) if own_file is not None else run_token(token_file)


def grid_key(token_file: str | None) -> Token | None:
    """What the keys of a run's grid links are derived from; None where they are plain.

    Raises:
        ConfigError: as `read_token`.
    """
    return read_token(grid_key_file(token_file)) if token_file is not None else None


def grid_key_file(token_file: str) -> Path:
    """The grid key lies beside the token."""
    return Path(token_file).with_name(GRID_KEY_FILE)


def token_from_environment() -> Token:
    """The token whose file the environment names.

    Raises:
        ConfigError: it names none, or as `read_token`.
    """
    path = os.environ.get(TOKEN_FILE_VARIABLE)
    if not path:
        raise ConfigError([f"{TOKEN_FILE_VARIABLE} names no token file"])
    return read_token(path)


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine alone; of names only `localhost` does."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listener(host: str, what: str, *, is_guarded: bool) -> None:
    """Refuse to listen on all interfaces, on a name, and beyond loopback without a secret to ask for.

    Args:
        host: The address to listen on.
        what: Names the listener.
        is_guarded: Whether it asks for a secret.

    Raises:
        ConfigError: it may not listen there.
    """
    if is_loopback(host):
        return
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError([f"{what}: {host!r} is no IP address; fix: give one of this machine"]) from None
    if address.is_unspecified or address.is_multicast:
        raise ConfigError([f"{what}: {host} is every interface; fix: give the address of one"])
    if not is_guarded:
        fix = 'runtime.token = "always", or loopback'
        raise ConfigError([f"{what}: {host} can be reached from other machines, and there is no token; fix: {fix}"])


def _make(path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(NUM_RANDOM_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was first: its token counts
            os.link(part, path)
        part.unlink()
    except OSError as error:
        raise CannotWrite(f"token file {path} cannot be made: {error.strerror}") from None
