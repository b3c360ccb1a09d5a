"""What `/openapi.json` says about the value service's routes: schemas and examples of both encodings.

Notable:
- Bodies are read and written by hand (limits, threads, arrays), so their schemas are written by hand too; a fuzzer
  holds the running application against them.
- The MessagePack schemas describe the map that is encoded; `bin` fields are raw little-endian arrays.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np

from services.wire.messages import LoadReply
from services.wire.scoring import MEDIA_TYPE, ScoredBatch, TokenBatch, encode_reply, encode_request
from value_service.requests import Limits

Schema = dict[str, Any]
_JSON = "application/json"
_NUMBERS: Schema = {"type": "array", "items": {"type": "number"}}
_STEP: Schema = {"type": "integer", "minimum": 0, "description": "critic grids fully applied"}


def _object(properties: Schema, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), **more}


def _bin(kind: str) -> Schema:
    return {"type": "string", "format": "binary", "description": f"bin: {kind} array, little-endian"}


def _reply(description: str, schema: Schema, **more: Any) -> dict[str, Any]:
    return {"description": description, "content": {_JSON: {"schema": schema, **more}}}


_ERROR = _object({"error": {"type": "string", "maxLength": 2000}}, additionalProperties=False)
_BACK = {"Retry-After": {"schema": {"type": "string"}, "description": "seconds"}}
_REFUSED: dict[int | str, dict[str, Any]] = {
    400: _reply("The body cannot be decoded.", _ERROR),
    401: _reply("No token, or a wrong one.", _ERROR),
    413: _reply("The body is larger than `value.max_request_bytes`.", _ERROR),
    415: _reply("Content-Type is of another kind.", _ERROR),
    422: _reply("A field is wrong; one line names it.", _ERROR),
}

_BATCH = TokenBatch.of([[7, 8, 9], [7]])
_SCORED = ScoredBatch(
    _BATCH.lengths, np.array([0, 0.5, 0.25, 0], dtype="<f4"), np.array([1.0, 0.5], dtype="<f4"), critic_step=12
)
_PACKED_BODY = _object({"lengths": _bin("u32 [S]"), "token_ids": _bin("u32 [T]")}, additionalProperties=False)
_SCORE_REPLY: Schema = {
    "oneOf": [
        _object(
            {
                "values": {"type": "array", "items": _NUMBERS},
                "bootstrap_values": _NUMBERS,
                "critic_step": _STEP,
            },
            additionalProperties=False,
        ),
        _object(
            {"values": _NUMBERS, "bootstrap_value": {"type": "number"}, "critic_step": _STEP},
            additionalProperties=False,
        ),
    ]
}
_PACKED_REPLY = _object(
    {
        "lengths": _bin("u32 [S]"),
        "values": _bin("f32 [T]"),
        "bootstrap_values": _bin("f32 [S]"),
        "critic_step": _STEP,
    }
)


def _in_base64(packed: bytes) -> dict[str, Any]:
    text = "base64 of the bytes; the same numbers as the JSON example"
    return {"packed": {"summary": text, "value": base64.b64encode(packed).decode()}}


def score_request(limits: Limits) -> dict[str, Any]:
    """What `POST /v1/score` takes of a service with these limits."""
    item = {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}
    ids: Schema = {"type": "array", "minItems": 1, "maxItems": limits.branch_tokens, "items": item}
    most = f"at most {limits.tokens} tokens in all"
    branches = {"type": "array", "minItems": 1, "maxItems": limits.branches, "items": ids, "description": most}
    forms = [
        _object({name: of}, additionalProperties=False)
        for name, of in (("batched_token_ids", branches), ("token_ids", ids))
    ]
    examples = {
        "batched": {"value": {"batched_token_ids": [[7, 8, 9], [7]]}},
        "single": {"value": {"token_ids": [7, 8, 9]}},
    }
    content = {
        _JSON: {"schema": {"oneOf": forms}, "examples": examples},
        MEDIA_TYPE: {"schema": _PACKED_BODY, "examples": _in_base64(encode_request(_BATCH))},
    }
    return {"requestBody": {"required": True, "content": content}}


SCORE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Values in the request's order, all by one state of the critic; as `Accept` wishes.",
        "content": {
            _JSON: {
                "schema": _SCORE_REPLY,
                "examples": {
                    "batched": {"value": msgspec.to_builtins(_SCORED.to_reply())},
                    "single": {"value": {"values": [0.0, 0.5, 0.25], "bootstrap_value": 1.0, "critic_step": 12}},
                },
            },
            MEDIA_TYPE: {"schema": _PACKED_REPLY, "examples": _in_base64(encode_reply(_SCORED))},
        },
    },
    **_REFUSED,
    406: _reply("Accept allows neither encoding.", _ERROR),
    408: _reply("The body did not come within `value.body_deadline_s`.", _ERROR),
    429: {**_reply("Too many requests, or bytes, in flight.", _ERROR), "headers": _BACK},
    500: _reply("The critic produced a non-finite value.", _ERROR),
    503: {**_reply("Loading, or stopping.", _ERROR), "headers": _BACK},
}
_MODEL = _object(
    {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "max_model_len": {"type": "integer", "description": "tokens a branch"},
        "vocab_size": {"type": "integer"},
    }
)
_LIMITS = _object({name: {"type": "integer"} for name in ("bytes", "branches", "tokens")})
MODELS: dict[int | str, dict[str, Any]] = {
    200: _reply(
        "The model, and the limits of one request.",
        _object({"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}, "limits": _LIMITS}),
    )
}
_PATH: Schema = {"type": "string", "minLength": 1, "maxLength": 4096}
LOAD_REQUEST: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            _JSON: {
                "schema": _object({"path": _PATH}, additionalProperties=False),
                "examples": {"critic": {"value": {"path": "models/sao-critic"}}},
            }
        },
    }
}
LOAD: dict[int | str, dict[str, Any]] = {
    200: _reply("Every rank has the new weights.", msgspec.json.schema_components((LoadReply,))[1]["LoadReply"]),
    **_REFUSED,
    403: _reply("The folder is not below `value.load_roots`.", _ERROR),
    409: _reply("Another load is under way, or the critic has adapters.", _ERROR),
}
