"""What the control routes and the local engine say of a body that is none: a 4xx in one line, never a 500."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from services.inference.local_routes import BadRequest, GenerateBody, _decode
from services.runtime.ports import PortReservation
from services.training.board import StatusBoard
from services.training.control import MAX_COMMAND_BYTES, ServerThread, control_app
from services.training.saver import Saver

NESTED = b'{"step": ' + b"[" * 3000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    board = StatusBoard("policy")
    board.enter("idle")
    folder: Path = tmp_path_factory.mktemp("run")
    saver = Saver(cast(Any, None), board, folder)  # no request here gets as far as the part
    with PortReservation(["http"]) as reserved:
        url = f"http://127.0.0.1:{reserved.ports['http']}"
        server = ServerThread(control_app(board, title="policy", saver=saver), url)
        server.start()
        yield url
        server.stop()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (NESTED, 422),
        (b'{"step": -1}', 422),
        (b'{"step": true}', 422),
        (b'{"step": 1, "path": "/"}', 422),
        (b'{"step": 1}' + b" " * MAX_COMMAND_BYTES, 413),
    ],
)
def test_a_body_that_is_no_command_is_refused_in_one_short_line(url: str, body: bytes, status: int) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.request("POST", "/checkpoint", body)
    reply = connection.getresponse()
    said = reply.read()
    connection.close()

    assert reply.status == status
    assert said.startswith(b'{"error":') and len(said) < 300 and b"\n" not in said


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"token_ids": ' + b"[" * 100_000])
def test_the_local_engine_calls_such_a_body_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        _decode(body, GenerateBody)
