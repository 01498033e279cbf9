# SPDX-License-Identifier: Apache-2.0
"""What one answer of a worker turned out to be: its usage, when it began, and whether it came to its proper end.

Fed with the bytes as they pass, it holds none back. Only plain ``text/event-stream`` and ``application/json`` are
looked into; any other type (audio, a compressed body) is counted by status alone.
"""

from __future__ import annotations

from http import HTTPStatus

from router.gateway.headers import Headers, header
from router.gateway.sse import EventStream
from router.gateway.usage import usage_of_json
from router.request import InferenceRequest, Outcome, RequestKind, Usage

_BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


def outcome_of_status(status: int) -> Outcome:
    """Whose fault a status is; 408 and 429 say that the worker has too much to do."""
    if status in _BUSY:
        return Outcome.BUSY
    if 400 <= status < 500:
        return Outcome.CLIENT_ERROR
    return Outcome.WORKER_ERROR if status >= 500 else Outcome.OK


class Answer:
    """State of one answer while it passes."""

    __slots__ = (
        "_ended",
        "_json",
        "_json_bytes",
        "_max_json_bytes",
        "begun",
        "events",
        "needs_done",
        "status",
        "usage",
    )

    def __init__(self, request: InferenceRequest, status: int, headers: Headers, max_json_bytes: int) -> None:
        media_type = (header(headers, b"content-type") or b"").partition(b";")[0].strip().lower()
        readable = (
            200 <= status < 300 and (header(headers, b"content-encoding") or b"identity") == b"identity"
        )
        self.status = status
        self.usage: Usage | None = None
        self.begun = False
        """The first byte of the answer has passed; of a stream, the first event with content."""
        self.events = EventStream() if readable and media_type == b"text/event-stream" else None
        self.needs_done = self.events is not None and request.stream and request.kind is not RequestKind.OTHER
        """Chat and completion streams end with ``[DONE]``; other streams have ends of their own."""
        self._json: list[bytes] | None = [] if readable and media_type == b"application/json" else None
        self._json_bytes = 0
        self._max_json_bytes = max_json_bytes
        self._ended = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing that belongs to the answer is missing, as far as its format tells."""
        marked = self.events is not None and self.events.done
        return marked or (self._ended and not self.needs_done)

    @property
    def outcome(self) -> Outcome:
        """How the attempt ended, once the answer is over."""
        if self.events is not None and self.events.error_seen:
            code = self.events.error_code or 0
            return outcome_of_status(code) if code >= 400 else Outcome.WORKER_ERROR
        return outcome_of_status(self.status)

    def feed(self, piece: bytes) -> None:
        """Look at the next bytes."""
        if self.events is not None:
            self.events.feed(piece)
            self.begun = self.events.content_seen
            self.usage = self.events.usage
            return
        self.begun = True
        if self._json is not None:
            self._json_bytes += len(piece)
            if self._json_bytes > self._max_json_bytes:
                self._json = None
            else:
                self._json.append(piece)

    def end(self) -> None:
        """The worker has ended its answer in an orderly way."""
        self._ended = True
        if self.events is not None:
            self.events.end()
            self.usage = self.events.usage
        elif self._json is not None:
            self.usage = usage_of_json(b"".join(self._json))
