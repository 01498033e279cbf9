# SPDX-License-Identifier: Apache-2.0
"""One stream of an HTTP/2 connection, as both directions know it."""

from __future__ import annotations

from collections import deque
from typing import Protocol

STREAM_WINDOW_BYTES = 4 * 2**20
"""What a peer may send on one stream ahead of us."""


class StreamEvents(Protocol):
    """Whoever serves a stream."""

    def data(self, data: bytes) -> None:
        """Bytes have come."""

    def ended(self) -> None:
        """No more will come."""

    def gone(self) -> None:
        """The peer or the connection is gone; nothing can be sent any more."""


class Stream:
    """What the connection keeps of one stream."""

    __slots__ = (
        "events",
        "id",
        "no_more_in",
        "queue",
        "queued_bytes",
        "receive_window",
        "send_window",
        "taken_bytes",
        "trailers",
    )

    def __init__(self, stream_id: int, send_window: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = STREAM_WINDOW_BYTES
        self.taken_bytes = 0
        """Received and not yet given back to the peer's window."""
        self.queue: deque[bytes] | None = None
        """What waits to be sent; seldom anything does."""
        self.queued_bytes = 0
        self.trailers: bytes | None = None
        """To be sent behind the queue."""
        self.no_more_in = False
        self.events: StreamEvents | None = None
