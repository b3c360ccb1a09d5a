"""A value service in this process: the real application and scorer on a small critic, one rank, no socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI

from services.config.train import ValueConfig
from services.model.head import Critic
from services.model.load import load_causal_lm
from services.model.mesh import Mesh
from services.runtime.auth import Token
from services.training.board import StatusBoard
from services.training.optimizer import Optimizer
from services.training.parts import Part
from services.training.ranks import Ranks
from services.transport.token_guard import TokenGuard
from value_service.app import score_app
from value_service.commands import CriticCommands
from value_service.loader import Loader
from value_service.scorer import Scorer

VOCABULARY = 261
SEQ_LEN = 64


@dataclass
class Answer:
    """What the application sent back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def call(
    app: FastAPI,
    method: str,
    path: str,
    body: bytes | list[bytes] = b"",
    headers: Mapping[str, str] = {},
    *,
    pause_s: float = 0.0,
) -> Answer:
    """One request over ASGI; a list is sent chunk by chunk, with a pause before each."""
    chunks = [body] if isinstance(body, bytes) else list(body)
    answer = Answer()
    names = {name.lower(): value for name, value in headers.items()}
    if isinstance(body, bytes) and body:
        names.setdefault("content-length", str(len(body)))

    async def receive() -> dict[str, Any]:
        if pause_s:
            await asyncio.sleep(pause_s)
        if not chunks:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in names.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
    await app(scope, receive, send)
    return answer


@dataclass
class InProcess:
    """The parts, for tests to look at."""

    app: Any
    """FastAPI's, behind the guard where there is a token"""
    critic: Critic
    board: StatusBoard
    scorer: Scorer
    part: Part
    held: threading.Event
    """clear it, and the command loop stands still"""


@contextmanager
def serving(model: Path, config: ValueConfig, *, token: Token | None = None) -> Iterator[InProcess]:
    """A critic with a seeded head that is not zero, and a command loop in a thread."""
    torch.set_num_threads(1)
    language_model = load_causal_lm(model)
    critic = Critic(language_model, head_init_std=0.1, seed=1)
    board = StatusBoard("critic")
    scorer = Scorer(critic, Ranks(), Mesh(), board, seq_len=config.model.seq_len)
    optimizer = Optimizer(critic, config.optim, Ranks(), warmup_updates=0)
    part = Part("critic", critic, optimizer, Mesh(), Ranks())
    loader = Loader(part, board, config, model, language_model.config)
    commands, stop, held = CriticCommands(scorer, loader), threading.Event(), threading.Event()
    held.set()

    def loop() -> None:
        while not stop.is_set():
            held.wait()
            if commands.pending():
                commands.execute(commands.next_command())
                board.enter("idle")
            commands.wait(0.002)

    app = score_app(scorer, board, config, vocab_size=VOCABULARY, model_name="tiny", loader=loader)
    guarded = app if token is None else TokenGuard(app, token)
    board.enter("idle")
    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield InProcess(guarded, critic, board, scorer, part, held)
    finally:
        held.set()
        stop.set()
        thread.join()
