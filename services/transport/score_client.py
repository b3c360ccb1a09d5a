"""Values for token sequences from the value service, over HTTP, checked before anybody sees them.

Notable:
- Scoring is pure, so it is tried again after anything but a 4xx, within one absolute deadline.
- A reply either fits its request in every count and length and is finite, or is a ScoreContractError. No value is ever
  made up: without values there is no step.
"""

from __future__ import annotations

import uuid

import aiohttp
import msgspec
import numpy as np

from services.transport.http import make_session, request
from services.wire.errors import ScoreContractError
from services.wire.messages import ScoreReply

REPLY_BYTES_PER_TOKEN = 32
"""A JSON float of 17 digits, sign, exponent and comma, and some air."""

_decode_reply = msgspec.json.Decoder(ScoreReply).decode


class ScoreClient:
    """A client of one value service.

    Args:
        url: http://host:port of the service
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/") + "/v1/score"
        self._session: aiohttp.ClientSession | None = None

    async def score(self, batched_token_ids: list[list[int]], *, deadline_s: float) -> ScoreReply:
        """Score branches in one request; values and bootstrap values come in the request's order.

        Args:
            batched_token_ids: the branches' token ids
            deadline_s: seconds from now, all attempts included

        Raises:
            ScoreContractError: the reply does not fit the request, naming the branch.
            ContractError: the service finds the request wrong.
            DeadlineExceeded, DependencyLost: no reply in time, or a service that keeps failing.
        """
        num_tokens = sum(map(len, batched_token_ids))
        reply = await request(
            self._open(),
            "POST",
            self._url,
            deadline_s=deadline_s,
            what=f"value service to score {len(batched_token_ids)} branches of {num_tokens} tokens",
            body=msgspec.json.encode({"batched_token_ids": batched_token_ids}),
            headers={"X-Request-Id": uuid.uuid4().hex},  # the same for every attempt
            max_reply_bytes=REPLY_BYTES_PER_TOKEN * (num_tokens + len(batched_token_ids)) + 4096,
        )
        try:
            score = _decode_reply(reply)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            # JSON has no NaN and no Infinity: those, and null, end here
            raise ScoreContractError(f"the value service's reply is not one: {error}") from None
        check_reply(score, batched_token_ids)
        return score

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = make_session()
        return self._session


def check_reply(reply: ScoreReply, batched_token_ids: list[list[int]]) -> None:
    """Check that a reply fits its request.

    Raises:
        ScoreContractError: naming the first branch that does not fit.
    """
    num_branches = len(batched_token_ids)
    if len(reply.values) != num_branches or len(reply.bootstrap_values) != num_branches:
        raise ScoreContractError(
            f"{len(reply.values)} branches of values and {len(reply.bootstrap_values)} bootstrap values "
            f"for {num_branches} branches"
        )
    for branch, (values, token_ids) in enumerate(zip(reply.values, batched_token_ids, strict=True)):
        if len(values) != len(token_ids):
            raise ScoreContractError(f"branch {branch}: {len(values)} values for {len(token_ids)} tokens")
        if not np.isfinite(values).all():
            raise ScoreContractError(f"branch {branch}: a value is not finite")
    if not np.isfinite(reply.bootstrap_values).all():
        branch = int(np.flatnonzero(~np.isfinite(reply.bootstrap_values))[0])
        raise ScoreContractError(f"branch {branch}: the bootstrap value is not finite")
    if reply.critic_step < 0:
        raise ScoreContractError(f"critic_step is {reply.critic_step}")
