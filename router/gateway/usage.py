# SPDX-License-Identifier: Apache-2.0
"""The engine's token counts, read from an answer. Unreadable counts are absent, never an error.

Format: OpenAI ``usage`` objects as vLLM sends them; ``prompt_tokens_details.cached_tokens`` is there only with the
engine's ``--enable-prompt-tokens-details``.
"""

from __future__ import annotations

import json

import msgspec

from router.request import Usage


class Envelope(msgspec.Struct):
    """The top-level members of an answer or a stream event that matter here; all others are skipped."""

    usage: object = None
    error: object = None
    code: object = None
    choices: object = None
    kind: object = msgspec.field(default=None, name="object")


class _UsageOnly(msgspec.Struct):
    usage: object = None


_decode_envelope = msgspec.json.Decoder(Envelope).decode
_decode_usage = msgspec.json.Decoder(_UsageOnly).decode


def read_envelope(data: bytes) -> Envelope | None:
    """Decode one event's data; None when it is not a JSON object."""
    try:
        return _decode_envelope(data)
    except (msgspec.DecodeError, RecursionError):
        members = _second_chance(data)
    if members is None:
        return None
    return Envelope(
        usage=members.get("usage"),
        error=members.get("error"),
        code=members.get("code"),
        choices=members.get("choices"),
        kind=members.get("object"),
    )


def usage_of_json(body: bytes) -> Usage | None:
    """Usage of a whole JSON answer."""
    try:
        return usage_of(_decode_usage(body).usage)
    except (msgspec.DecodeError, RecursionError):
        members = _second_chance(body)
    return None if members is None else usage_of(members.get("usage"))


def usage_of(value: object) -> Usage | None:
    """Usage from a decoded ``usage`` member."""
    if not isinstance(value, dict):
        return None
    prompt = _count(value.get("prompt_tokens"))
    if prompt is None:
        return None
    details = value.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=_count(value.get("completion_tokens")) or 0,
        cached_tokens=cached,
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _second_chance(data: bytes) -> dict[str, object] | None:
    """What Python's parser takes and msgspec's does not (lone surrogates, NaN)."""
    try:
        document: object = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
