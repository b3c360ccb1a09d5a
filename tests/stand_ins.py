"""The other processes of a run, as threads of the test: the orchestrator's own parts stay real, and so do the wires.

Notable:
- A trainer group without a model: the real receiver takes real grids, the real board and control routes answer, and a
  step takes as long as it is told. The critic also scores: every token is worth 0.
- Asked for a checkpoint, a group writes its step, or says that its disk is full; it can also begin at a later step.
- Where roles share devices, groups begin asleep and do nothing before they are woken. Every change, and everything that
  is asked of somebody who sleeps, is in one log.
- An engine without a model: it answers after a while, with one token and the end token, by the version it was given.
- One HTTP server serves all of it, whichever run is on: starting one takes longer than a run.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from fastapi import FastAPI, Request, Response

from services.config.context import RunContext
from services.runtime.manifests import write_manifest
from services.runtime.ports import PortReservation
from services.training.board import StatusBoard
from services.training.control import ServerThread, control_app
from services.transport.grid_receiver import GridReceiver
from services.wire.grids import GridItem, Stream
from services.wire.scoring import MEDIA_TYPE, ScoredBatch, decode_request, encode_reply
from tests.runs import read_lines

RUN = {"run_id": "run", "epoch": 1}
POLL_S = 0.001
CHARACTERS = "0123456789+="
EOS = len(CHARACTERS)


def write_tokenizer(folder: Path) -> Path:
    """One token a character, and an end token: all of a model's folder that the orchestrator reads."""
    vocab = {character: index for index, character in enumerate(CHARACTERS)} | {"<end>": EOS}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="="))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


@dataclass
class Group:
    """A trainer group of one process: `before(step, items)` runs at the start of each step, which takes `step_s`."""

    stream: Stream
    grid_url: str
    num_data_ranks: int
    weights_dir: Path
    step_s: float = 0.0
    held_step: int | None = None
    """the step that does not end before `release` is set"""
    announcing_s: float = 0.0
    """between the announcement of a snapshot and its step being done"""
    first_step: int = 0
    """steps done before this start"""
    disk_is_full: bool = False
    shares: bool = False
    """begins asleep"""
    log: list[str] = field(default_factory=list)
    """who slept, woke, worked, and who was asked to while asleep"""
    score_s: float = 0.0
    num_scoring: int = 0
    most_scoring: int = 0
    """scoring requests at a time"""
    before: Callable[[int, list[GridItem]], None] = lambda step, items: None
    release: threading.Event = field(default_factory=threading.Event)
    started: list[int] = field(default_factory=list)
    """steps in the order in which they were begun"""
    counters: list[dict[str, int]] = field(default_factory=list)
    """each receiver's, at the end"""
    num_left: int = 0
    """grids that came as the run was cut, too late to be begun"""

    def __post_init__(self) -> None:
        self.board = StatusBoard(self.stream)
        self.board.progress(steps_done=self.first_step)
        if self.stream == "policy" and self.first_step:
            path = self.weights_dir / f"v{self.first_step:06d}"
            path.mkdir(parents=True, exist_ok=True)
            self.board.progress(published={"version": self.first_step, "path": str(path)})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.stream, daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(timeout=10)
            assert not self._thread.is_alive()

    def _run(self) -> None:
        receivers = [
            GridReceiver(
                self.grid_url,
                stream=self.stream,
                data_rank=rank,
                num_data_ranks=self.num_data_ranks,
                first_step=self.first_step,
                **RUN,
            )
            for rank in range(self.num_data_ranks)
        ]
        self.board.enter("asleep" if self.shares else "idle", "a grid or a request")
        while not self._stop.is_set():
            if self.board.state != "asleep" and all(receiver.waiting_step() is not None for receiver in receivers):
                step = self.first_step + len(self.started)
                self._train(step, [receiver.take(step, deadline_s=1) for receiver in receivers])
            self._stop.wait(POLL_S)
        for receiver in receivers:
            receiver.close()
            self.counters.append(receiver.counters)
            self.num_left = int(receiver.waiting_step() is not None)

    def _train(self, step: int, items: list[GridItem]) -> None:
        self.board.enter("training")
        self.started.append(step)
        self.log.append(f"{self.stream} trains {step}")
        self.before(step, items)
        time.sleep(self.step_s)
        while step == self.held_step and not (self.release.is_set() or self._stop.is_set()):
            time.sleep(POLL_S)
        if self.stream == "policy":
            path = self.weights_dir / f"v{step + 1:06d}"
            path.mkdir(parents=True, exist_ok=True)
            self.board.progress(published={"version": step + 1, "path": str(path)})
            time.sleep(self.announcing_s)
        self.board.add_row(step, {f"{'policy' if self.stream == 'policy' else 'value'}/loss": float(step)})
        self.board.progress(steps_done=step + 1, updates_done=step + 1)
        self.board.enter("idle", "a grid or a request")

    def app(self) -> FastAPI:
        """The control routes; the critic's with scoring."""
        app = control_app(self.board, title=self.stream)

        @app.post("/v1/score")
        async def score(request: Request) -> Response:
            if self.board.state == "asleep":
                self.log.append(f"{self.stream} is asked to score asleep")
                return Response(status_code=503)
            self.log.append(f"{self.stream} scores")
            self.num_scoring += 1
            self.most_scoring = max(self.most_scoring, self.num_scoring)
            batch = decode_request(await request.body())
            await asyncio.sleep(self.score_s)
            self.num_scoring -= 1
            values, bootstrap_values = np.zeros(len(batch.token_ids)), np.zeros(len(batch.lengths))
            scored = ScoredBatch(batch.lengths, values, bootstrap_values, self.board.steps_done)
            return Response(encode_reply(scored), media_type=MEDIA_TYPE)

        @app.post("/checkpoint")
        async def checkpoint(request: Request) -> Response:
            self.log.append(f"{self.stream} writes{' asleep' if self.board.state == 'asleep' else ''}")
            if self.disk_is_full:
                return Response(json.dumps({"error": "No space left on device"}), status_code=507)
            step = (await request.json())["step"]
            folder = self.weights_dir.parent / "checkpoints" / f".step_{step:06d}.part" / self.stream
            folder.mkdir(parents=True)
            (folder / "state.json").write_text(json.dumps({"steps_done": self.board.steps_done}))
            write_manifest(folder, {})
            return Response(json.dumps({"num_bytes": 100}))

        @app.post("/sleep")
        async def sleep() -> dict[str, Any]:
            self.log.append(f"{self.stream} sleeps")
            self.board.enter("asleep", "its turn")
            return {"role": self.stream, "state": "asleep", "num_bytes": 10, "seconds": 0.0, "device_bytes": 3}

        @app.post("/wake_up")
        async def wake_up() -> dict[str, Any]:
            self.log.append(f"{self.stream} wakes")
            self.board.enter("idle", "a grid or a request")
            return {"role": self.stream, "state": "idle", "num_bytes": 10, "seconds": 0.0, "device_bytes": 13}

        return app


@dataclass
class Engine:
    """Says "7" and the end token, `turn_s` after it was asked."""

    turn_s: float = 0.0
    version: int = 0
    said: list[int] = field(default_factory=lambda: [7, EOS])
    holds: Callable[[int], bool] = lambda number: False
    """requests, counted from 0, that are never answered, unless as aborted by a sleep"""
    num_asked: int = 0
    num_held: int = 0
    is_asleep: bool = False
    log: list[str] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/inference/v1/generate")
        async def generate(_: Request) -> dict[str, Any]:
            number, self.num_asked = self.num_asked, self.num_asked + 1
            if self.is_asleep:
                self.log.append("inference is asked to sample asleep")
            if self.holds(number):
                self.num_held += 1
                while not self.is_asleep:
                    await asyncio.sleep(0.02)
                return {"choices": [{"token_ids": [], "finish_reason": "abort", "logprobs": {"content": []}}]}
            await asyncio.sleep(self.turn_s)
            choice = {
                "token_ids": self.said,
                "finish_reason": "stop",
                "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in self.said]},
                "weight_versions": [{"version": f"v{self.version}", "start": 0, "end": len(self.said)}],
            }
            return {"choices": [choice]}

        @app.get("/weight_info")
        async def weight_info() -> dict[str, str]:
            return {"weight_version": f"v{self.version}"}

        @app.post("/update_weight_version")
        async def update(request: Request) -> dict[str, str]:
            self.version = int((await request.json())["new_version"].removeprefix("v"))
            self.log.append(f"inference takes {self.version}{' asleep' if self.is_asleep else ''}")
            return {}

        @app.post("/collective_rpc")
        async def collective_rpc() -> dict[str, list[str]]:
            return {"results": ["17"]}

        @app.post("/sleep")
        async def sleep() -> dict[str, str]:
            self.is_asleep = True
            self.log.append("inference sleeps")
            return {}

        @app.post("/wake_up")
        async def wake_up() -> dict[str, str]:
            self.is_asleep = False
            self.log.append("inference wakes")
            return {}

        @app.get("/is_sleeping")
        async def is_sleeping() -> dict[str, bool]:
            return {"is_sleeping": self.is_asleep}

        @app.api_route("/{name}", methods=["GET", "POST"])
        async def anything_else(name: str) -> dict[str, str]:  # health, pause, resume
            return {}

        return app


class Server:
    """One HTTP server for whatever is mounted at the moment."""

    def __init__(self) -> None:
        self.url = ""
        self._none = self._app = FastAPI()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await (self._none if scope["type"] == "lifespan" else self._app)(scope, receive, send)

    @contextmanager
    def running(self) -> Iterator[Server]:
        with PortReservation(["http"]) as reserved:
            self.url = f"http://127.0.0.1:{reserved.ports['http']}"
            thread = ServerThread(self, self.url)  # pyright: ignore[reportArgumentType]
            thread.start()
            try:
                yield self
            finally:
                thread.stop()

    def mount(self, **apps: FastAPI) -> None:
        self._app = FastAPI()
        for name, app in apps.items():
            self._app.mount(f"/{name}", app)


@dataclass
class Stage:
    """One run's surroundings: what the orchestrator finds when it comes up."""

    run_dir: Path
    server: Server
    context: RunContext
    policy: Group
    critic: Group
    engine: Engine
    log: list[str]
    """of everybody"""

    def rows(self, stream: str) -> list[dict[str, Any]]:
        """Metric rows of one stream, in the order of writing."""
        return [row for row in read_lines(self.run_dir / "metrics.jsonl") if row["stream"] == stream]

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Both groups and the engine are up; at the end they have received nothing twice, late or unasked."""
        self.server.mount(policy=self.policy.app(), critic=self.critic.app(), engine=self.engine.app())
        with ExitStack() as stack:
            for group in (self.policy, self.critic):
                stack.enter_context(group.running())
            yield
        for group in (self.policy, self.critic):
            accepted = len(group.started) + group.num_left
            assert group.counters == [{"accepted": accepted} if accepted else {}] * group.num_data_ranks


@contextmanager
def staged(
    run_dir: Path,
    server: Server,
    model_dir: Path,
    *,
    num_value_ranks: int = 1,
    commit_dir: Path | None = None,
    first_steps: tuple[int, int] = (0, 0),
    replay_of: Path | None = None,
    shares: bool = False,
) -> Iterator[Stage]:
    """A stage on free ports; from a commit, with the steps that policy and critic have done; or with a record.

    With `shares` the groups begin asleep.
    """
    run_dir.mkdir(parents=True, exist_ok=commit_dir is not None)
    with PortReservation(["policy", "critic", "page"]) as reserved:
        grids = {name: f"tcp://127.0.0.1:{reserved.ports[name]}" for name in ("policy", "critic")}
        context = RunContext(
            dir=str(run_dir),
            model_dir=str(model_dir),
            inference_urls=[f"{server.url}/engine"] if replay_of is None else [],
            commit_dir=None if commit_dir is None else str(commit_dir),
            replay_of=None if replay_of is None else str(replay_of),
            policy_url=f"{server.url}/policy",
            value_url=f"{server.url}/critic",
            orchestrator_url=f"http://127.0.0.1:{reserved.ports['page']}",
            policy_grid_url=grids["policy"],
            critic_grid_url=grids["critic"],
            **RUN,
        )
        weights_dir = run_dir / "weights"
        log: list[str] = []
        more: dict[str, Any] = {"shares": shares, "log": log}
        policy = Group("policy", grids["policy"], 1, weights_dir, first_step=first_steps[0], **more)
        critic = Group("critic", grids["critic"], num_value_ranks, weights_dir, first_step=first_steps[1], **more)
        yield Stage(run_dir, server, context, policy, critic, Engine(log=log), log)
