# SPDX-License-Identifier: Apache-2.0
"""What one ext_proc stream carries, as plain values. ``router.extproc.wire`` translates from and to protobuf.

Header names are lower-case bytes, pseudo headers (``:path``) among them, as for the gateway. Structs, since several are
made for each request.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from router.gateway.headers import Headers


class Side(enum.Enum):
    """Which half of the exchange a message is about."""

    REQUEST = "request"
    RESPONSE = "response"


class BodyMode(enum.Enum):
    """How the proxy shows bodies (Envoy ``ProcessingMode.BodySendMode``)."""

    NONE = "none"  # headers only
    STREAMED = "streamed"  # chunk by chunk, each to be answered before it goes on
    BUFFERED = "buffered"  # headers are answered first, then the whole body in one message
    DUPLEX = "full_duplex_streamed"  # nothing goes on but what is sent back


class Modes(NamedTuple):
    """What the proxy says of both sides in its first message."""

    request: BodyMode
    response: BodyMode


FULL_DUPLEX = Modes(BodyMode.DUPLEX, BodyMode.DUPLEX)
"""What the protocol's own gateways are configured with."""


class HeadersSeen(Struct, frozen=True, gc=False):
    """Headers of one side."""

    side: Side
    headers: Headers
    end_of_stream: bool
    subset: Sequence[str] | None = None
    """Entries of the subset hint; None: the proxy gave none."""
    served: str | None = None
    """``ip:port`` that answered, where the proxy says so."""
    modes: Modes | None = None
    """None: the proxy does not say."""
    observing: bool = False
    """The proxy waits for no answers and takes none."""


class BodySeen(Struct, frozen=True, gc=False):
    """A piece of a body."""

    side: Side
    data: bytes
    end_of_stream: bool
    subset: Sequence[str] | None = None


class TrailersSeen(Struct, frozen=True, gc=False):
    """The end of a side that has trailers."""

    side: Side
    subset: Sequence[str] | None = None


Message = HeadersSeen | BodySeen | TrailersSeen


class Mutation(Struct, frozen=True, gc=False):
    """Changes of headers. ``destination``: also told as dynamic metadata, equal to the header."""

    set_headers: Headers = ()
    remove_headers: Sequence[bytes] = ()
    destination: str | None = None
    scores: Mapping[str, float] | None = None
    """Of endpoints, told beside the destination."""


NO_CHANGE = Mutation()


class HeadersAnswer(Struct, frozen=True, gc=False):
    """Lets headers go on."""

    side: Side
    mutation: Mutation = NO_CHANGE


class BodyAnswer(Struct, frozen=True, gc=False):
    """Lets a body go on that the proxy holds: as it is, or replaced by ``data``."""

    side: Side
    data: bytes | None = None
    mutation: Mutation = NO_CHANGE


class BodyPiece(Struct, frozen=True, gc=False):
    """A piece of what goes on instead of the body (full duplex)."""

    side: Side
    data: bytes
    end_of_stream: bool


class TrailersAnswer(Struct, frozen=True, gc=False):
    """Lets trailers go on."""

    side: Side


class Immediate(Struct, frozen=True, gc=False):
    """The proxy answers the client with this; nothing else follows on the stream."""

    status: int
    headers: Headers
    body: bytes
    detail: str
    """For the proxy's own log."""


Answer = HeadersAnswer | BodyAnswer | BodyPiece | TrailersAnswer | Immediate

MAX_PIECE_BYTES = 62_000
"""Some proxies take no message above 64 KiB; the reference picker keeps this distance."""


def pieces(side: Side, data: bytes, *, end_of_stream: bool) -> list[Answer]:
    """A body cut into messages, at least one; the last has the flag."""
    if len(data) <= MAX_PIECE_BYTES:
        return [BodyPiece(side, data, end_of_stream)]
    starts = range(0, len(data), MAX_PIECE_BYTES)
    last = starts[-1]
    view = memoryview(data)
    return [
        BodyPiece(side, bytes(view[start : start + MAX_PIECE_BYTES]), end_of_stream and start == last)
        for start in starts
    ]
