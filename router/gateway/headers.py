# SPDX-License-Identifier: Apache-2.0
"""Which headers cross the gateway, in both directions. Names are lower-case bytes, as ASGI gives them.

Hop-by-hop fields: RFC 9110 section 7.6.1. ``content-length`` of a request is set again from the bytes that go out;
that of an answer stays, because answers are never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Headers = Sequence[tuple[bytes, bytes]]

REQUEST_ID = b"x-request-id"
_OURS = b"x-pointsman-"
_MAX_REQUEST_ID_BYTES = 128
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# accept-encoding is ours: the proxy asks for plain bytes, so that it passes on what the worker wrote and can read usage.
_NOT_TO_WORKER = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding", REQUEST_ID}


def request_id_of(headers: Headers, make: Callable[[], str]) -> str:
    """The client's ``x-request-id`` if it is printable ASCII of sane length, else a new one."""
    value = header(headers, REQUEST_ID)
    if value and len(value) <= _MAX_REQUEST_ID_BYTES and all(0x21 <= byte <= 0x7E for byte in value):
        return value.decode("ascii")
    return make()


def header(headers: Headers, name: bytes) -> bytes | None:
    """The first value of a header."""
    for candidate, value in headers:
        if candidate == name:
            return value
    return None


def to_worker(headers: Headers, overrides: Headers, request_id: str) -> list[tuple[bytes, bytes]]:
    """Headers of the request that goes to the worker; ``overrides`` replace the client's of the same name."""
    dropped = _NOT_TO_WORKER | _named_by_connection(headers) | {name.lower() for name, _ in overrides}
    kept = [pair for pair in headers if pair[0] not in dropped and not pair[0].startswith(_OURS)]
    kept.extend(overrides)
    kept.append((b"accept-encoding", b"identity"))
    if header(overrides, REQUEST_ID) is None:
        kept.append((REQUEST_ID, request_id.encode("ascii", "replace")))
    return kept


def to_client(
    raw: Iterable[tuple[bytes, bytes]], added: Headers, request_id: str
) -> list[tuple[bytes, bytes]]:
    """Headers of the answer that goes to the client; ``added`` replace the worker's of the same name."""
    headers = [(name.lower(), value) for name, value in raw]
    dropped = _HOP_BY_HOP | _named_by_connection(headers) | {name for name, _ in added} | {REQUEST_ID}
    kept = [pair for pair in headers if pair[0] not in dropped and not pair[0].startswith(_OURS)]
    kept.extend(added)
    if header(added, REQUEST_ID) is None:
        kept.append((REQUEST_ID, request_id.encode("ascii", "replace")))
    return kept


def _named_by_connection(headers: Headers) -> set[bytes]:
    """Fields that ``Connection`` lists are hop-by-hop too."""
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return named
