# SPDX-License-Identifier: Apache-2.0
"""Adding top-level keys to a JSON body without touching any other byte.

The keys go right before the closing brace, so every byte the client sent stays as it was: unknown fields, key order,
big integers, lone surrogates and duplicate keys included. A key that the client had also sent comes later and
therefore wins in every parser that keeps the last of two equal keys (Python, pydantic and msgspec do).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping

_WHITESPACE = b" \t\n\r"  # RFC 8259 section 2


class NotAJsonObjectError(ValueError):
    """The body is not the UTF-8 text of a JSON object, so no key can be added to it."""


def insert_keys(body: bytes, keys: Mapping[str, object]) -> bytes:
    """Return ``body`` with ``keys`` added at its end; ``body`` itself when there is nothing to add.

    Only the two ends of the body are looked at, so the cost is that of copying it once. What lies between the braces
    is not checked: a malformed object stays malformed.

    Raises:
        NotAJsonObjectError: the body does not start with ``{`` and end with ``}``.
        TypeError, ValueError: a value has no JSON form.
    """
    if not keys:
        return body
    start = _object_start(body)
    closing = len(body.rstrip(_WHITESPACE)) - 1
    if start >= closing or body[start] != 0x7B or body[closing] != 0x7D:
        raise NotAJsonObjectError("the request body is not a JSON object in UTF-8")
    # Looking back from the brace for the last byte that is not white space tells an empty object.
    last = len(body[:closing].rstrip(_WHITESPACE)) - 1
    added = json.dumps(dict(keys), separators=(",", ":"), allow_nan=False)[1:-1].encode("ascii")
    separator = b"" if last == start else b","
    view = memoryview(body)
    return b"".join((view[:closing], separator, added, view[closing:]))


def _object_start(body: bytes) -> int:
    """Index of the first byte that is neither a byte order mark nor white space."""
    text = body.removeprefix(codecs.BOM_UTF8)
    return len(body) - len(text.lstrip(_WHITESPACE))
