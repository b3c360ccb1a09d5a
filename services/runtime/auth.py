"""A bearer token from a file that only its owner can read.

Notable:
- The file is made with 32 random bytes where there is none; two processes that come at once end with the same token.
- The token itself is in no configuration, command line, log or exception: only the path of its file is.
- Comparison takes the same time wherever a wrong token begins to differ, and whatever its length.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from services.wire.errors import CannotWrite, ConfigError

NUM_RANDOM_BYTES = 32
_GOOD = re.compile(rb"[\x21-\x7e]{16,512}")
_SCHEME = b"bearer "


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
