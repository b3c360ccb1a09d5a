"""Values for token sequences from the value service, over HTTP, checked before anybody sees them.

Notable:
- Requests and replies are MessagePack: a quarter of JSON's bytes, and no float is printed and read again.
- Scoring is pure, so it is tried again after anything but a 4xx, within one absolute deadline.
- A reply either fits its request in every count and length and is finite, or is a ScoreContractError. No value is ever
  made up: without values there is no step.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import aiohttp
import msgspec
import numpy as np

from services.runtime.auth import Token
from services.transport.http import get_json, make_session, request
from services.wire.errors import CodecError, ContractError, ScoreContractError
from services.wire.messages import ScoreReply
from services.wire.scoring import MEDIA_TYPE, ScoredBatch, TokenBatch, decode_reply, encode_request


class ServiceFacts(msgspec.Struct, frozen=True):
    """What a value service says of itself at `/v1/models`."""

    model: str
    max_model_len: int
    """tokens of a branch at most"""
    vocab_size: int
    max_bytes: int
    max_branches: int
    max_tokens: int


class ScoreClient:
    """A client of one value service, on one event loop.

    Args:
        url: http://host:port of the service
        token: what it asks for, if it does
    """

    def __init__(self, url: str, *, token: Token | None = None) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def score(self, batched_token_ids: Sequence[Sequence[int]], *, deadline_s: float) -> ScoreReply:
        """Score branches in one request; values and bootstrap values come in the request's order.

        Args:
            batched_token_ids: the branches' token ids
            deadline_s: seconds from now, all attempts included

        Raises:
            ScoreContractError: the reply does not fit the request, naming the branch.
            ContractError: the service finds the request wrong.
            DeadlineExceeded, DependencyLost: no reply in time, or a service that keeps failing.
        """
        batch = TokenBatch.of(batched_token_ids)
        num_branches, num_tokens = len(batch.lengths), len(batch.token_ids)
        reply = await request(
            self._open(),
            "POST",
            f"{self._url}/v1/score",
            deadline_s=deadline_s,
            what=f"value service to score {num_branches} branches of {num_tokens} tokens",
            body=encode_request(batch),
            headers={
                "Content-Type": MEDIA_TYPE,
                "Accept": MEDIA_TYPE,
                "X-Request-Id": uuid.uuid4().hex,  # the same for every attempt
            },
            max_reply_bytes=4 * (num_tokens + 2 * num_branches) + 4096,
        )
        try:
            scored = decode_reply(reply)
        except CodecError as error:
            raise ScoreContractError(f"the value service's reply is not one: {error}") from None
        check_reply(scored, batch)
        return scored.to_reply()

    async def facts(self, *, deadline_s: float) -> ServiceFacts:
        """Ask for the service's model and limits.

        Raises:
            ContractError, DeadlineExceeded, DependencyLost: as `services.transport.http.request`.
        """
        url = f"{self._url}/v1/models"
        reply = await get_json(self._open(), url, deadline_s=deadline_s)
        try:
            (model,), limits = reply["data"], reply["limits"]
            own = {"model": model["id"], "max_model_len": model["max_model_len"], "vocab_size": model["vocab_size"]}
            return msgspec.convert(own | {f"max_{name}": value for name, value in limits.items()}, ServiceFacts)
        except (KeyError, TypeError, ValueError, msgspec.ValidationError):
            raise ContractError(f"{url} is not a value service of this version") from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = make_session(token=self._token)
        return self._session


def check_reply(scored: ScoredBatch, batch: TokenBatch) -> None:
    """Check that a reply fits its request.

    Raises:
        ScoreContractError: naming the first branch that does not fit.
    """
    num_branches = len(batch.lengths)
    if len(scored.lengths) != num_branches or len(scored.bootstrap_values) != num_branches:
        raise ScoreContractError(
            f"{len(scored.lengths)} branches of values and {len(scored.bootstrap_values)} bootstrap values "
            f"for {num_branches} branches"
        )
    wrong = np.flatnonzero(scored.lengths != batch.lengths)
    if len(wrong):
        branch = int(wrong[0])
        raise ScoreContractError(f"branch {branch}: {scored.lengths[branch]} values for {batch.lengths[branch]} tokens")
    if len(scored.values) != len(batch.token_ids):
        raise ScoreContractError(f"{len(scored.values)} values in all for {len(batch.token_ids)} tokens")
    for what, finite in (
        ("a value", [np.isfinite(values).all() for values in scored.branches()]),
        ("the bootstrap value", np.isfinite(scored.bootstrap_values)),
    ):
        if not np.all(finite):
            raise ScoreContractError(f"branch {int(np.argmin(finite))}: {what} is not finite")
    if scored.critic_step < 0:
        raise ScoreContractError(f"critic_step is {scored.critic_step}")
