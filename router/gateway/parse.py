# SPDX-License-Identifier: Apache-2.0
"""What routing needs to know of a request, read from its body without ever changing it.

No input raises: a field of a wrong type counts as absent, because the worker will answer with its own 4xx. Numbers
and flags are read as leniently as the engine reads them (pydantic's lax mode takes ``"2"``, ``2.0`` and ``"true"``):
a request that the engine runs as two sequences must never look like one here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import msgspec

from router.packed_ids import packed_ids, parsed_ids
from router.request import InferenceRequest, RequestKind

_KINDS = {"/v1/chat/completions": RequestKind.CHAT, "/v1/completions": RequestKind.COMPLETION}
_TRUE_WORDS = frozenset({"1", "on", "t", "true", "y", "yes"})  # pydantic's, in lower case
_DP_RANK = b"x-data-parallel-rank"  # vLLM entrypoints/openai: X-data-parallel-rank
_MAX_DIGITS = 18
_decode = msgspec.json.Decoder().decode
_decode_parts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_BEGINS_IDS = re.compile(rb'"prompt"[ \t\n\r]*:[ \t\n\r]*\[[ \t\n\r]*[0-9]')


def parse_request(
    method: str,
    path: str,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
    request_id: str,
) -> InferenceRequest:
    """Describe a request. ``path`` comes without its query; header names are in lower case."""
    kind = _KINDS.get(path, RequestKind.OTHER) if method == "POST" else RequestKind.OTHER
    document = _with_ids(body) if kind is RequestKind.COMPLETION else None
    if document is None:
        document = parse_object(body)
        if document is not None:
            _pack_ids(document)
    fields: Mapping[str, object] = document if document is not None else {}
    model = fields.get("model")
    salt = fields.get("cache_salt")
    return InferenceRequest(
        request_id=request_id,
        method=method,
        path=path,
        kind=kind,
        body=body,
        document=document,
        model=model if isinstance(model, str) else None,
        stream=_flag(fields.get("stream")),
        sequences=count_sequences(kind, fields),
        max_tokens=_max_tokens(kind, fields),
        cache_salt=salt if isinstance(salt, str) and salt else None,
        dp_rank=_dp_rank(headers),
    )


def parse_object(body: bytes) -> dict[str, object] | None:
    """The body as a JSON object, or None.

    The second parser takes what Python's does and msgspec's does not: NaN, lone surrogates, a byte order mark.
    UTF-16 and UTF-32 are left alone, since no key could be added to such a body.
    """
    if not body:
        return None
    document: object
    try:
        document = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        try:
            text = body.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogatepass")
            document = json.loads(text)
        except (ValueError, RecursionError):
            return None
    return document if isinstance(document, dict) else None


def _with_ids(body: bytes) -> dict[str, object] | None:
    """The body as a JSON object whose prompt is an array, at a third of the time; None where ``parse_object`` is to look.

    Whether the prompt is a list of token ids is only guessed by the first text that looks like one; what is then read
    is what any parser reads. Of equal keys the last one counts.
    """
    at = body.find(b'"prompt"')
    if at < 0 or _BEGINS_IDS.match(body, at) is None:
        return None
    try:
        parts = _decode_parts(body)
        raw = parts.get("prompt")
        ids = None if raw is None else parsed_ids(bytes(raw))
        if ids is None:
            return None
        return {name: ids if name == "prompt" else _decode(part) for name, part in parts.items()}
    except (msgspec.DecodeError, RecursionError):
        return None


def _pack_ids(document: dict[str, object]) -> None:
    """Keep a prompt of token ids as an array, for as numbers they would live until the answer ends."""
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        ids = packed_ids(prompt)
        if ids is not None:
            document["prompt"] = ids


def begins_object(body: bytes) -> bool:
    """Whether the first byte that counts opens an object, for bodies that this parser did not take."""
    return body.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\n\r").startswith(b"{")


def is_wide_json(body: bytes) -> bool:
    """Whether the body is a JSON object in UTF-16 or UTF-32.

    ``json.loads`` of the workers takes such bytes (``json.detect_encoding``), RFC 8259 does not, and nothing here
    can look into them.
    """
    if json.detect_encoding(body) in {"utf-8", "utf-8-sig"}:
        return False
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def count_sequences(kind: RequestKind, fields: Mapping[str, object]) -> int:
    """Sequences the engine runs: prompts times the larger of n and best_of; beam search counts at least two."""
    if kind is RequestKind.OTHER:
        return 1
    width = max(_whole(fields.get("n")) or 1, _whole(fields.get("best_of")) or 1, 1)
    if _flag(fields.get("use_beam_search")):
        width = max(width, 2)
    prompts = _count_prompts(fields) if kind is RequestKind.COMPLETION else 1
    return prompts * width


def _count_prompts(fields: Mapping[str, object]) -> int:
    """Prompts of a completion: a string or a list of ids is one, a list of either is as many as it holds."""
    prompts = _list_length(fields.get("prompt"), (str, list)) + _list_length(
        fields.get("prompt_embeds"), (str,)
    )
    return max(prompts, 1)


def _list_length(value: object, element: tuple[type, ...]) -> int:
    if isinstance(value, list):
        return len(value) if value and isinstance(value[0], element) else min(len(value), 1)
    return 1 if isinstance(value, str) else 0


def _max_tokens(kind: RequestKind, fields: Mapping[str, object]) -> int | None:
    if kind is RequestKind.CHAT:
        newer = _whole(fields.get("max_completion_tokens"))
        if newer is not None:
            return newer
    return _whole(fields.get("max_tokens"))


def _whole(value: object) -> int | None:
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        digits = value.strip()
        if digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS:
            return int(digits)
    return None


def _flag(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() in _TRUE_WORDS
    return isinstance(value, (bool, int, float)) and value == 1


def _dp_rank(headers: Sequence[tuple[bytes, bytes]]) -> int | None:
    for name, value in headers:
        if name == _DP_RANK:
            digits = value.strip()
            return int(digits) if digits.isdigit() and len(digits) <= _MAX_DIGITS else None
    return None
