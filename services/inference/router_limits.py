"""What a request through the router may ask for at most.

Notable:
- Bounds on bytes follow from the model's longest sequence: a token id takes at most ten digits, a comma and a space;
  a sampled token comes back with its log-probability, about a hundred characters in all.
- Only the limits are read here; whatever else is wrong with a request, the engine says.
"""

from __future__ import annotations

import msgspec

from services.wire.errors import ContractError

TOKEN_BYTES = 12
SAMPLED_BYTES = 256
OTHER_BYTES = 2**16
"""Of everything else in a request or a reply: sampling parameters, names, stop ids."""
MAX_CHOICES = 16
TOKEN_PATH = "/token"  # noqa: S105 - a path
"""Of the guard: 200 where the token that is shown is right."""


class _Limited(msgspec.Struct):
    max_tokens: int | None = None
    n: int = 1


class _Request(_Limited):
    sampling_params: _Limited | None = None


_decode = msgspec.json.Decoder(_Request).decode


def max_body_bytes(max_model_len: int) -> int:
    """Bytes of the largest request that an engine of this length could take."""
    return OTHER_BYTES + TOKEN_BYTES * max_model_len


def max_reply_bytes(max_model_len: int) -> int:
    """Bytes of the largest reply that such a request could have."""
    return OTHER_BYTES + MAX_CHOICES * SAMPLED_BYTES * max_model_len


def check_request(raw: bytes, max_model_len: int) -> None:
    """Refuse what asks for more than one sequence could be.

    Raises:
        ContractError: it does, or is no JSON object. The text holds nothing of the request.
    """
    try:
        body = _decode(raw)
    except (msgspec.DecodeError, RecursionError):  # the latter of a body that nests without end
        raise ContractError("body: a JSON object is needed, with max_tokens and n as integers") from None
    for part in (body, body.sampling_params or _Limited()):
        if part.max_tokens is not None and part.max_tokens > max_model_len:
            raise ContractError(f"max_tokens: at most {max_model_len}")
        if not 1 <= part.n <= MAX_CHOICES:
            raise ContractError(f"n: from 1 to {MAX_CHOICES}")
