"""The value service alone, two real ranks: scoring over HTTP, and a grid that trains in between."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.config.context import RunContext
from services.config.schema import Config
from services.model.export import export_critic
from services.model.head import Critic, values_before_tokens
from services.model.layout import PackedLayout
from services.model.load import load_causal_lm
from services.packing.grid import build_grid
from services.transport.grid_sender import GridSender
from services.transport.score_client import ScoreClient
from services.wire.samples import TrainingSample
from services.wire.scoring import decode_reply
from tests.crowds import PROBE, many_files, raw_score, send_slowly
from tests.exports import state_of
from tests.runs import get, post, processes, read_lines, wait_until
from tests.samples import make_sample

SEQ_LEN = 128
VOCABULARY = 261


@pytest.fixture(scope="module")
def critics(tmp_path_factory) -> Path:
    """The folder that weights may be loaded from."""
    return tmp_path_factory.mktemp("critics")


@pytest.fixture(scope="module")
def service(tiny_model: Path, critics: Path, tmp_path_factory) -> Iterator[tuple[Config, RunContext]]:
    """A critic of two ranks with a seeded head that is not zero."""
    run_dir = tmp_path_factory.mktemp("value") / "run"
    overrides = [
        ("model.path", str(tiny_model)),
        ("value.head.init_std", "0.1"),
        ("value.model.seq_len", str(SEQ_LEN)),
        ("value.max_request_bytes", "200000"),
        ("value.max_requests_in_flight", "256"),
        ("value.load_roots", f'["{critics}"]'),
        ("inference.max_model_len", "64"),
    ]
    with processes(run_dir, ["value"], "configs/demo/sao.toml", *overrides) as started:
        yield started


def branches(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]


def expected(config: Config, context: RunContext, batch: list[list[int]]) -> list[tuple[list[float], float]]:
    """Values of each branch alone, by the untrained critic in this process."""
    assert config.value is not None
    critic = Critic(load_causal_lm(context.model_dir), head_init_std=config.value.head.init_std, seed=config.seed)
    out = []
    for branch in batch:
        with torch.no_grad():
            output = critic(torch.tensor(branch), PackedLayout.of([len(branch)]))
        values, bootstrap = values_before_tokens(output, torch.tensor([len(branch)]))
        out.append((values.tolist(), float(bootstrap[0])))
    return out


def status(context: RunContext) -> dict:
    reply = get(f"{context.value_url}/status")
    assert reply is not None
    return reply


def test_batched_values_equal_each_branch_alone_in_the_original_order(service) -> None:
    config, context = service
    batch = branches([5, 128, 1, 17, 3, 64, 2, 40])
    code, reply = post(f"{context.value_url}/v1/score", {"batched_token_ids": batch})
    assert code == 200 and reply["critic_step"] == 0
    for (values, bootstrap), own, own_bootstrap in zip(
        expected(config, context, batch), reply["values"], reply["bootstrap_values"], strict=True
    ):
        assert np.allclose(own, values, atol=1e-5) and abs(own_bootstrap - bootstrap) < 1e-5
        assert own[0] == 0.0
    assert np.abs(reply["bootstrap_values"]).max() > 0.05


def test_single_form_equals_batched_form(service) -> None:
    _, context = service
    (branch,) = branches([9], seed=4)
    _, single = post(f"{context.value_url}/v1/score", {"token_ids": branch})
    _, batched = post(f"{context.value_url}/v1/score", {"batched_token_ids": [branch]})
    assert single["values"] == batched["values"][0] and single["bootstrap_value"] == batched["bootstrap_values"][0]


def test_value_before_a_token_does_not_depend_on_it(service) -> None:
    """Changing token t and everything after leaves V_0 .. V_t as they are."""
    _, context = service
    (first,) = branches([20], seed=1)
    second = first[:8] + branches([12], seed=2)[0]
    _, reply = post(f"{context.value_url}/v1/score", {"batched_token_ids": [first, second]})
    assert np.allclose(reply["values"][0][:9], reply["values"][1][:9], atol=1e-6)
    assert not np.allclose(reply["values"][0][9:], reply["values"][1][9:], atol=1e-4)


def test_sixteen_requests_at_once_need_fewer_than_sixteen_forwards(service) -> None:
    _, context = service
    before = status(context)["num_forwards"]
    batches = [branches([6, 11], seed=i) for i in range(16)]

    async def burst() -> list:
        client = ScoreClient(context.value_url)
        try:
            return await asyncio.gather(*(client.score(batch, deadline_s=60) for batch in batches))
        finally:
            await client.close()

    replies = asyncio.run(burst())
    assert status(context)["num_forwards"] - before < 16
    for batch, reply in zip(batches, replies, strict=True):
        assert [len(values) for values in reply.values] == [len(branch) for branch in batch]
    _, alone = post(f"{context.value_url}/v1/score", {"batched_token_ids": batches[7]})
    assert np.allclose(np.concatenate(replies[7].values), np.concatenate(alone["values"]), atol=1e-5)


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({"batched_token_ids": [[1, 2], []]}, 422, "batched_token_ids[1]"),
        ({"batched_token_ids": []}, 422, "batched_token_ids"),
        ({"batched_token_ids": [[1]], "token_ids": [1]}, 422, "exactly one"),
        ({}, 422, "exactly one"),
        ({"batched_token_ids": [[1, VOCABULARY]]}, 422, "batched_token_ids[0]"),
        ({"batched_token_ids": [[1, -1]]}, 422, "batched_token_ids[0]"),
        ({"token_ids": [7] * (SEQ_LEN + 1)}, 422, "value.model.seq_len"),
        ({"batched_token_ids": [[True]]}, 422, "batched_token_ids"),
        ({"batched_token_ids": [["7"]]}, 422, "batched_token_ids"),
        ({"batched_token_ids": [[1.5]]}, 422, "batched_token_ids"),
        ({"token_ids": [1], "temperature": 1}, 422, "unknown field"),
        (b'{"token_ids": [1, 2', 400, "JSON"),
        (b"[" * 100_000, 400, "body"),
        (b'{"token_ids": [' + b"9" * 5000 + b"]}", 422, "token_ids"),
        (b'{"token_ids": [' + b"1," * 150_000 + b"1]}", 413, "body"),
    ],
)
def test_wrong_request_is_refused_in_one_line_without_an_echo(service, body, code: int, field: str) -> None:
    _, context = service
    before = status(context)["num_forwards"]
    got, reply = post(f"{context.value_url}/v1/score", body)
    assert got in (400, 413, 422) and (got == code or code in (400, 422))
    assert len(json.dumps(reply)) < 400 and "\n" not in reply["error"]
    if got == code:
        assert field in reply["error"]
    assert status(context)["num_forwards"] == before


def test_a_grid_that_trains_in_between_leaves_each_reply_with_one_critic_step(service) -> None:
    """Requests go on while a grid trains; every reply is one state of the critic, and the states are in order."""
    config, context = service
    probe = branches([30], seed=9)

    async def scenario() -> list:
        sender = GridSender(context.critic_grid_url, stream="critic", run_id="test", epoch=1, num_data_ranks=2)
        client = ScoreClient(context.value_url)
        try:
            before = await client.score(probe * 3, deadline_s=60)  # the grid may overtake what is asked from here on
            asking = [asyncio.create_task(client.score(probe * 3, deadline_s=60)) for _ in range(10)]
            await sender.send(critic_grid(step=0), deadline_s=60)
            while (await client.score(probe * 3, deadline_s=60)).critic_step == 0:
                asking += [asyncio.create_task(client.score(probe * 3, deadline_s=60)) for _ in range(4)]
                await asyncio.sleep(0.01)
            return [before, *await asyncio.gather(*asking, client.score(probe * 3, deadline_s=60))]
        finally:
            await client.close()
            await sender.close()

    replies = asyncio.run(scenario())
    by_step: dict[int, list] = {0: [], 1: []}
    for reply in replies:
        by_step[reply.critic_step].append(reply)
        assert np.allclose(reply.values[0], reply.values[1], atol=1e-6) and np.allclose(
            reply.values[0], reply.values[2], atol=1e-6
        )
    assert by_step[0] and by_step[1]
    for step in (0, 1):
        assert all(np.allclose(reply.values[0], by_step[step][0].values[0], atol=1e-6) for reply in by_step[step])
    assert not np.allclose(by_step[0][0].values[0], by_step[1][0].values[0], atol=1e-4)
    wait_until(lambda: status(context)["steps_done"] == 1, deadline_s=10, what="the status to say so")
    row = status(context)["rows"]["0"]
    assert config.value is not None
    assert status(context)["updates_done"] == config.value.updates_per_batch == row["value/updates"]
    ledger = read_lines(context.run_dir / "logs" / "ledger-critic.jsonl")
    assert sorted((entry["step"], entry["rank"]) for entry in ledger) == [(0, 0), (0, 1)]
    assert len({entry["pid"] for entry in ledger}) == 2 and len({entry["item"] for entry in ledger}) == 2


def critic_grid(step: int):
    """Six samples with targets of 1 and 0."""
    samples: list[TrainingSample] = []
    for i in range(6):
        sample = make_sample([1] * (4 + i), values=[0.0] * (4 + i), trace_id=f"t{i}", prompt=3)
        sample.returns = np.where(sample.branch.action_mask, float(i % 2), 0.0)
        samples.append(sample)
    return build_grid(
        samples,
        stream="critic",
        seq_len=SEQ_LEN,
        num_data_ranks=2,
        run_id="test",
        epoch=1,
        step=step,
        policy_version=step,
        temperature=1.0,
        loss_name="mse",
        loss_constants={},
    )


def test_a_burst_of_200_requests_while_a_grid_trains_is_answered_and_so_is_a_single_one(service) -> None:
    """Scenario: 200 requests at once and a grid amid them; then one after ten seconds of rest.

    Result: all are answered, each as the critic of the one step that it names says it, in the request's order; who
    asks after an answer by the new critic is not answered by the old one; none waits for much longer than a grid takes.
    """
    _, context = service
    done = status(context)["steps_done"]
    batches = [branches([3 + i % 50, 9], seed=i) for i in range(200)]
    answers: list[tuple[float, float, Any] | None] = [None] * 200

    async def scenario() -> tuple[Any, Any, Any]:
        sender = GridSender(context.critic_grid_url, stream="critic", run_id="test", epoch=1, num_data_ranks=2)
        client = ScoreClient(context.value_url)

        async def ask(number: int) -> None:
            await asyncio.sleep(0.002 * number)
            started = time.monotonic()
            reply = await client.score(batches[number], deadline_s=60)
            answers[number] = (started, time.monotonic(), reply)

        async def all_in_one() -> Any:
            return await client.score([branch for batch in batches for branch in batch], deadline_s=60)

        try:
            before = await all_in_one()
            asking = [asyncio.create_task(ask(number)) for number in range(200)]
            await asyncio.sleep(0.05)
            await sender.send(critic_grid(step=done), deadline_s=60)
            await asyncio.gather(*asking)
            after = await all_in_one()
            await asyncio.sleep(10)
            return before, after, await client.score(batches[0], deadline_s=5)
        finally:
            await client.close()
            await sender.close()

    before, after, single = asyncio.run(scenario())
    said = [answer for answer in answers if answer is not None]
    assert len(said) == 200
    assert {reply.critic_step for _, _, reply in said} == {done, done + 1}
    assert (before.critic_step, after.critic_step, single.critic_step) == (done, done + 1, done + 1)
    assert not np.allclose(np.concatenate(before.values), np.concatenate(after.values), atol=1e-4)
    for number, (_, _, reply) in enumerate([*said, (0.0, 0.0, single)]):
        own = slice(2 * (number % 200), 2 * (number % 200) + 2)
        state = before if reply.critic_step == done else after
        for values, expected in zip(reply.values, state.values[own], strict=True):
            assert np.allclose(values, expected, atol=1e-5)
        assert np.allclose(reply.bootstrap_values, state.bootstrap_values[own], atol=1e-5)
    first_new = min(ended for _, ended, reply in said if reply.critic_step == done + 1)
    assert all(reply.critic_step == done + 1 for started, _, reply in said if started > first_new)
    assert max(ended - started for started, ended, _ in said) < 20


def test_a_thousand_requests_at_once_beside_slow_headers_find_a_bounded_queue(service) -> None:
    """Scenario (F19): 100 connections send a header byte by byte; beside them 1,000 requests, each on its own.

    Result: the queue takes 256 at once, and the others hear 429 or 503 and when to come again; then they are served
    too. Every answer is right. The slow ones are cut off in the end. The health route answers throughout.
    """
    _, context = service
    host, _, port = context.value_url.removeprefix("http://").partition(":")
    batches = [branches([3 + i % 50, 60], seed=1000 + i) for i in range(1000)]

    async def scenario() -> tuple[list, list, list[float], Any]:
        slow = [asyncio.create_task(send_slowly((host, int(port)))) for _ in range(100)]
        await asyncio.sleep(0.5)
        first = await asyncio.gather(*(raw_score((host, int(port)), batch) for batch in batches))
        client = ScoreClient(context.value_url)
        try:
            refused = [number for number, (code, _, _) in enumerate(first) if code != 200]
            later = await asyncio.gather(*(client.score(batches[number], deadline_s=100) for number in refused))
            alone = await client.score([branch for batch in batches[::10] for branch in batch], deadline_s=60)
        finally:
            await client.close()
        return first, list(zip(refused, later, strict=True)), await asyncio.gather(*slow), alone

    with (
        many_files(2048),
        subprocess.Popen(
            [sys.executable, "-c", PROBE, f"{host}:{port}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as probe,
    ):
        first, later, slow_s, alone = asyncio.run(scenario())
        said, _ = probe.communicate()
    codes = Counter(code for code, _, _ in first)
    assert set(codes) <= {200, 429, 503, 0} and codes[200] >= 256 and codes[429] + codes[503] > 0, codes
    assert all(headers["retry-after"] == "1" for code, headers, _ in first if code in (429, 503))
    replies = {i: decode_reply(body).to_reply() for i, (code, _, body) in enumerate(first) if code == 200} | dict(later)
    for number, batch in enumerate(batches):
        assert [len(values) for values in replies[number].values] == [len(branch) for branch in batch]
    for i, number in enumerate(range(0, 1000, 10)):
        expected = np.concatenate(alone.values[2 * i : 2 * i + 2])
        assert np.allclose(np.concatenate(replies[number].values), expected, atol=1e-5), number
    assert max(slow_s) < 40, "the deadline of a header is 10 s"
    taken = json.loads(said)
    print(f"answers {dict(codes)}; /livez {len(taken)} times, median {np.median(taken):.3f} s, most {max(taken):.3f} s")
    assert np.median(taken) < 0.2 and max(taken) < 5, "a margin for a machine that does other things as well"


def test_weights_are_replaced_on_both_ranks_and_the_step_goes_on(service, critics: Path) -> None:
    config, context = service
    other = Critic(load_causal_lm(context.model_dir), head_init_std=0.3, seed=77)
    facts = {"gamma": 1.0, "run": "other", "source": "by hand"}
    export_critic(state_of(other), Path(context.model_dir), critics / "other", support="scalar", **facts)
    done = status(context)["steps_done"]
    assert config.value is not None
    code, reply = post(f"{context.value_url}/load", {"path": str(critics / "other" / ".." / "..")})
    assert code == 403
    (critics / "empty").mkdir()
    assert post(f"{context.value_url}/load", {"path": str(critics / "empty")})[0] == 422
    code, reply = post(f"{context.value_url}/load", {"path": str(critics / "other")})
    assert (code, reply["critic_step"], reply["run"]) == (200, done, "other")
    batch = branches([31, 7, 90, 12], seed=5)
    _, scored = post(f"{context.value_url}/v1/score", {"batched_token_ids": batch})
    assert scored["critic_step"] == done and status(context)["num_loads"] == 1
    for branch, values, bootstrap in zip(batch, scored["values"], scored["bootstrap_values"], strict=True):
        with torch.no_grad():
            output = other(torch.tensor(branch), PackedLayout.of([len(branch)]))
        own, own_bootstrap = values_before_tokens(output, torch.tensor([len(branch)]))
        assert np.allclose(values, own, atol=1e-5) and abs(bootstrap - float(own_bootstrap[0])) < 1e-5


def test_other_routes_answer(service) -> None:
    _, context = service
    models = get(f"{context.value_url}/v1/models")
    assert models is not None and models["data"][0]["max_model_len"] == SEQ_LEN
    assert get(f"{context.value_url}/livez") == {"live": True}
    assert get(f"{context.value_url}/readyz") is not None
    assert len(set(status(context)["pids"])) == 2


def test_live_route_answers_while_many_requests_wait(service) -> None:
    _, context = service
    body = {"batched_token_ids": branches([100] * 60, seed=3)}
    with ThreadPoolExecutor(12) as pool:
        replies = [pool.submit(post, f"{context.value_url}/v1/score", body) for _ in range(12)]
        assert get(f"{context.value_url}/livez") == {"live": True}
        assert all(reply.result()[0] == 200 for reply in replies)
