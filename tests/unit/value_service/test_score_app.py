"""The scoring application in process: two encodings that say the same, limits before anything else, no echo, tokens."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
import schemathesis
import torch
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance

from services.config.train import OptimConfig, TrainModelConfig, ValueConfig
from services.model.head import values_before_tokens
from services.model.layout import PackedLayout
from services.runtime.auth import Token
from services.wire.scoring import MEDIA_TYPE, TokenBatch, decode_reply, encode_request
from tests.scoring import SEQ_LEN, VOCABULARY, InProcess, call, serving

JSON, PACKED = {"Content-Type": "application/json"}, {"Content-Type": MEDIA_TYPE}
MODEL, OPTIM = TrainModelConfig(seq_len=SEQ_LEN), OptimConfig(lr=0.1)
BRANCHES = [[1, 2, 3], [4], [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[InProcess]:
    config = ValueConfig(
        model=MODEL, optim=OPTIM, max_request_bytes=20_000, max_request_branches=16, max_request_tokens=300
    )
    with serving(tiny_model, config) as started:
        yield started


async def score(service: InProcess, body: Any, headers: dict[str, str] = JSON) -> Any:
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await call(service.app, "POST", "/v1/score", encoded, headers)


# ---------------------------------------------------------------------------------------------------------------------
# Encodings


async def test_both_encodings_say_what_the_critic_says_alone(service: InProcess) -> None:
    packed = await score(service, encode_request(TokenBatch.of(BRANCHES)), PACKED)
    plain = await score(service, {"batched_token_ids": BRANCHES})
    assert (packed.status, packed.headers["content-type"]) == (200, MEDIA_TYPE)
    assert (plain.status, plain.headers["content-type"]) == (200, "application/json")
    said = json.loads(plain.body)
    assert decode_reply(packed.body).to_reply().values == said["values"]
    assert decode_reply(packed.body).to_reply().bootstrap_values == said["bootstrap_values"]
    for branch, values, bootstrap in zip(BRANCHES, said["values"], said["bootstrap_values"], strict=True):
        with torch.no_grad():
            output = service.critic(torch.tensor(branch), PackedLayout.of([len(branch)]))
        own, own_bootstrap = values_before_tokens(output, torch.tensor([len(branch)]))
        assert np.allclose(values, own, atol=1e-5) and abs(bootstrap - float(own_bootstrap)) < 1e-5
        assert values[0] == 0.0 and len(values) == len(branch)


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("application/json", "application/json"),
        (MEDIA_TYPE, MEDIA_TYPE),
        ("*/*", MEDIA_TYPE),
        ("text/html, application/json;q=0.5", "application/json"),
        (f"application/json;q=0, {MEDIA_TYPE}", MEDIA_TYPE),
    ],
)
async def test_the_reply_is_encoded_as_accept_says_or_as_the_request_was(
    service: InProcess, accept, media_type
) -> None:
    answer = await score(service, encode_request(TokenBatch.of([[1, 2]])), {**PACKED, "Accept": accept})
    assert (answer.status, answer.headers["content-type"]) == (200, media_type)


async def test_single_form_has_a_reply_of_its_own(service: InProcess) -> None:
    single = json.loads((await score(service, {"token_ids": [1, 2, 3]})).body)
    batched = json.loads((await score(service, {"batched_token_ids": [[1, 2, 3]]})).body)
    assert single == {
        "values": batched["values"][0],
        "bootstrap_value": batched["bootstrap_values"][0],
        "critic_step": 0,
    }


async def test_a_large_request_leaves_the_event_loop_free(tiny_model: Path) -> None:
    """Scenario: 12 MB of JSON for as many ids as fit. Result: the loop is never away for as long as parsing takes."""
    config = ValueConfig(model=TrainModelConfig(seq_len=4096), optim=OPTIM)
    with serving(tiny_model, config) as service:
        body = json.dumps({"batched_token_ids": [[1] * 4000] * 1000 + [[VOCABULARY]]}).encode()
        asking = asyncio.create_task(score(service, body))
        longest_s, last = 0.0, time.monotonic()
        while not asking.done():
            await asyncio.sleep(0.001)
            longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
        assert asking.result().status == 422 and b"[1000]: a token id outside" in asking.result().body
        assert longest_s < 0.2


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("body", "headers", "status", "field"),
    [
        (b"x" * 20_001, JSON, 413, "body"),
        ({"token_ids": [1] * (SEQ_LEN + 1)}, JSON, 422, "value.model.seq_len is 64"),
        ({"batched_token_ids": [[1]] * 17}, JSON, 422, "more than 16 branches"),
        ({"batched_token_ids": [[1] * 60] * 6}, JSON, 422, "more than 300 tokens"),
        (encode_request(TokenBatch.of([[1]] * 17)), PACKED, 422, "17 branches"),
        (encode_request(TokenBatch.of([[1] * 60] * 6)), PACKED, 422, "360 tokens"),
        (encode_request(TokenBatch.of([[1], [2] * 65])), PACKED, 422, "branch 1"),
        (encode_request(TokenBatch.of([[1], [2, VOCABULARY]])), PACKED, 422, "branch 1: a token id outside"),
        (b"\xc1", PACKED, 400, "not valid MessagePack"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "content-type"),
        (b"{}", {}, 415, "content-type"),
        ({"token_ids": [1]}, {**JSON, "Accept": "text/html"}, 406, "accept"),
    ],
)
async def test_a_request_beyond_its_limits_is_refused_at_once(service, body, headers, status, field) -> None:
    started, before = time.monotonic(), service.board.snapshot().num_forwards
    answer = await score(service, body, headers)
    assert (answer.status, field in answer.body.decode()) == (status, True), answer
    assert time.monotonic() - started < 0.1 and len(answer.body) < 2000
    assert service.board.snapshot().num_forwards == before
    assert (await score(service, {"token_ids": [1]})).status == 200


@pytest.mark.parametrize("declared", ["30000", "-1", "1e3", "9" * 30])
async def test_what_declares_too_much_is_refused_before_it_is_read(service: InProcess, declared: str) -> None:
    app = service.app
    answer = await asyncio.wait_for(call(app, "POST", "/v1/score", [], {**JSON, "Content-Length": declared}), 1)
    assert answer.status == 413


async def test_a_chunked_body_is_refused_at_the_chunk_that_is_too_much(service: InProcess) -> None:
    chunks = [b" " * 9000] * 1000
    answer = await call(service.app, "POST", "/v1/score", chunks, JSON)
    assert answer.status == 413


async def test_a_body_that_drips_meets_its_deadline(tiny_model: Path) -> None:
    with serving(tiny_model, ValueConfig(model=MODEL, optim=OPTIM, body_deadline_s=0.2)) as service:
        started = time.monotonic()
        answer = await call(service.app, "POST", "/v1/score", [b"{"] * 100, JSON, pause_s=0.05)
        assert answer.status == 408 and 0.15 < time.monotonic() - started < 1


async def test_one_too_many_in_flight_is_told_to_come_back_before_it_is_read(tiny_model: Path) -> None:
    config = ValueConfig(model=MODEL, optim=OPTIM, max_requests_in_flight=3)
    with serving(tiny_model, config) as service:
        service.held.clear()
        waiting = [asyncio.create_task(score(service, {"token_ids": [n]})) for n in range(3)]
        await asyncio.sleep(0.05)
        started = time.monotonic()
        answer = await asyncio.wait_for(call(service.app, "POST", "/v1/score", [], JSON), 1)
        assert (answer.status, answer.headers["retry-after"]) == (429, "1") and time.monotonic() - started < 0.1
        assert (await call(service.app, "GET", "/livez")).status == 200
        service.held.set()
        assert [answer.status for answer in await asyncio.gather(*waiting)] == [200] * 3
        assert (await score(service, {"token_ids": [1]})).status == 200


async def test_too_many_bytes_in_flight_are_told_to_come_back(tiny_model: Path) -> None:
    config = ValueConfig(model=MODEL, optim=OPTIM, max_request_bytes=2000, max_bytes_in_flight=3000)
    body = encode_request(TokenBatch.of([[1] * 60] * 7))
    with serving(tiny_model, config) as service:
        service.held.clear()
        first = asyncio.create_task(score(service, body, PACKED))
        await asyncio.sleep(0.05)
        assert (await score(service, body, PACKED)).status == 429
        service.held.set()
        assert (await first).status == 200 and (await score(service, body, PACKED)).status == 200


async def test_a_value_that_is_not_finite_is_never_sent(tiny_model: Path) -> None:
    with serving(tiny_model, ValueConfig(model=MODEL, optim=OPTIM)) as service, torch.no_grad():
        service.critic.head.bias.fill_(float("nan"))
        for headers, body in ((JSON, b'{"token_ids": [1, 2]}'), (PACKED, encode_request(TokenBatch.of([[1]])))):
            answer = await score(service, body, headers)
            assert answer.status == 500 and "non-finite value in branch 0" in answer.body.decode()


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


async def test_without_the_token_nothing_but_the_health_routes_answers(tiny_model: Path) -> None:
    token = Token("secret-of-32-characters-or-so-xx")
    with serving(tiny_model, ValueConfig(model=MODEL, optim=OPTIM), token=token) as service:
        shown = {"Authorization": token.header()}
        for method, path in (("GET", "/status"), ("GET", "/metrics"), ("GET", "/v1/models"), ("GET", "/openapi.json"),
                             ("POST", "/v1/score"), ("POST", "/load"), ("GET", "/nothing")):  # fmt: skip
            for wrong in ({}, {"Authorization": "Bearer secret-of-32-characters-or-so-xy"},
                          {"Authorization": "Basic secret-of-32-characters-or-so-xx"},
                          {"Authorization": "Bearer "}, {"Authorization": "\u00e9"}):  # fmt: skip
                answer = await asyncio.wait_for(call(service.app, method, path, [], wrong), 1)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), (path, wrong)
                assert b"secret" not in answer.body
        assert (await call(service.app, "GET", "/livez")).status == 200
        assert (await call(service.app, "GET", "/readyz")).status == 200
        assert (await call(service.app, "GET", "/status", headers=shown)).status == 200
        assert (await score(service, {"token_ids": [1]}, JSON | shown)).status == 200


# ---------------------------------------------------------------------------------------------------------------------
# Fuzz


def packed_of(value: Any) -> bytes:
    """Whatever was generated, `format: binary` as bin."""
    return msgspec.msgpack.encode(value, enc_hook=lambda other: getattr(other, "data", str(other)))


def test_the_schema_is_true_for_whatever_it_allows_and_forbids(service: InProcess) -> None:
    """Every route, examples and generated requests, good and bad: documented statuses, types and bodies only."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", service.app)

    @schemathesis.serializer(MEDIA_TYPE)
    def as_message_pack(_context: Any, value: Any) -> bytes:
        return packed_of(value)

    names = []
    for result in schema.get_all_operations():
        operation = result.ok()
        names.append(operation.label)
        for mode in schemathesis.GenerationMode:

            @hypothesis.settings(
                max_examples=20,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def holds(case: schemathesis.Case) -> None:
                # lengths and ids that belong together are said in words only
                case.call_and_validate(excluded_checks=[positive_data_acceptance])

            try:
                holds()
            except hypothesis.errors.Unsatisfiable:
                assert mode == schemathesis.GenerationMode.NEGATIVE  # nothing to get wrong
    routes = ("GET /livez", "GET /readyz", "GET /status", "GET /metrics", "GET /v1/models", "POST /v1/score")
    assert sorted(names) == sorted([*routes, "POST /load"])


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


GOOD_JSON = json.dumps({"batched_token_ids": BRANCHES}).encode()
GOOD_PACKED = encode_request(TokenBatch.of(BRANCHES))


@pytest.mark.parametrize(("good", "headers"), [(GOOD_JSON, JSON), (GOOD_PACKED, PACKED)], ids=["json", "msgpack"])
def test_mutated_bodies_neither_break_nor_hang_nor_grow_the_service(service: InProcess, good, headers) -> None:
    sizes: list[int] = []

    @hypothesis.settings(max_examples=300, deadline=None, database=None)
    @hypothesis.given(st.data())
    def holds(data: st.DataObject) -> None:
        body = bytearray(good)
        for _ in range(data.draw(st.integers(1, 4))):
            position = data.draw(st.integers(0, len(body)))
            length = data.draw(st.integers(0, 4))
            body[position : position + length] = data.draw(st.binary(max_size=4))
        answer = asyncio.run(asyncio.wait_for(score(service, bytes(body), headers), 5))
        assert answer.status in (200, 400, 422), (bytes(body), answer)
        assert answer.status == 200 or len(answer.body) < 500
        sizes.append(rss_bytes())

    holds()
    assert max(sizes[len(sizes) // 2 :]) - sizes[len(sizes) // 4] < 32 * 2**20
