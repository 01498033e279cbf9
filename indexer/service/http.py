# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 for answers that are ready at once.

A question to the index takes some ten microseconds, of which a task, a receive and two sends an ASGI request would
take several times as much. Here a request is answered within the callback that brings its last byte. Answers that
take time (``/dump``) are awaited in a task, and requests behind them on the same connection wait.

Between two requests a connection first shows what arrived to the ``Gate``, which answers the plain form of the one
call that matters from the bytes as they came. What it leaves goes to the parser, from its first byte.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple, cast

import httptools
import msgspec

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_HEAD_BYTES = 64 * 1024
JSON = b"application/json"
_OUR_FAULT = "an error of the indexer, see its log"


class Answer(NamedTuple):
    """Status, body and content type."""

    status: int
    body: bytes
    content_type: bytes = JSON


class Request(NamedTuple):
    """A whole request."""

    method: str
    path: str
    body: bytes
    keep_alive: bool


Handler = Callable[[Request], Answer | Awaitable[Answer]]

Gate = Callable[[bytes], "bytes | int | None"]
"""From received bytes to a whole answer that keeps the connection; None: not here; an integer: so many bytes are the
whole request (0: not known yet)."""


def refusal(status: int, message: str) -> Answer:
    """An error as all calls tell it."""
    return Answer(status, msgspec.json.encode({"error": message}))


class HttpProtocol(asyncio.Protocol):
    """One connection; ``connections`` holds it while it is open."""

    def __init__(self, handler: Handler, connections: set[HttpProtocol], gate: Gate | None = None) -> None:
        self._handler = handler
        self._connections = connections
        self._gate = gate
        self._between = gate is not None  # requests, and the gate may see what comes
        self._held: list[bytes] = []  # shown to the gate, which waits for the rest
        self._missing_bytes = 0
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._head_bytes = 0
        self._parts: list[bytes] = []
        self._body_bytes = 0
        self._expects = False
        self._waiting: deque[Request] = deque()
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its bases
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._waiting.clear()
        self._held = []
        del self._parser  # which knows this object: nothing is left for the collector

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        if self._between and self.task is None:
            self._show(data)
        else:
            self._parse(data)

    def _show(self, data: bytes) -> None:
        """Let the gate answer; it is asked again only when the request that it waits for is whole."""
        if self._held:
            self._held.append(data)
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                return
            data = b"".join(self._held)
            self._held = []
        try:
            shown = cast("Gate", self._gate)(data)
        except Exception:
            log.exception("a request that was shown to the gate")
            self._refuse(500, _OUR_FAULT)
            return
        if isinstance(shown, bytes):
            self._transport.write(shown)
        elif shown is None:
            self._parse(data)
        else:
            self._held = [data]
            self._missing_bytes = max(shown - len(data), 1)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "only HTTP/1.1 is spoken here")
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is no HTTP request: {error}")

    def close(self) -> None:
        """End the connection after what is being answered."""
        if self.task is None:
            self._transport.close()

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._between = False
        self._url, self._head_bytes = b"", 0
        self._parts, self._body_bytes = [], 0
        self._expects = False

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        self._expects = self._expects or name.lower() == b"expect"

    def on_headers_complete(self) -> None:
        if self._expects and not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes <= MAX_BODY_BYTES:
            self._parts.append(body)
        elif not self._transport.is_closing():
            self._parts.clear()
            self._refuse(413, f"the body has more than {MAX_BODY_BYTES} bytes")

    def on_message_complete(self) -> None:
        if self._transport.is_closing():
            return
        path = self._url.partition(b"?")[0].decode("latin-1")
        method = self._parser.get_method().decode("latin-1")
        request = Request(method, path, b"".join(self._parts), self._parser.should_keep_alive())
        self._parts = []
        self._between = self._gate is not None
        if self.task is not None:
            self._waiting.append(request)
        else:
            self._answer(request)

    # Answers.

    def _answer(self, request: Request) -> None:
        try:
            answer = self._handler(request)
        except Exception:
            log.exception("%s %s", request.method, request.path)
            answer = refusal(500, _OUR_FAULT)
        if isinstance(answer, Answer):
            self._write(request, answer)
            return
        self._transport.pause_reading()
        self.task = asyncio.create_task(self._answer_later(request, answer))

    async def _answer_later(self, request: Request, awaitable: Awaitable[Answer]) -> None:
        try:
            answer = await awaitable
        except Exception:
            log.exception("%s %s", request.method, request.path)
            answer = refusal(500, _OUR_FAULT)
        self.task = None
        self._write(request, answer)
        while self._waiting and self.task is None:
            self._answer(self._waiting.popleft())
        if self.task is None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _write(self, request: Request, answer: Answer) -> None:
        if self._transport.is_closing():
            return
        body = b"" if request.method == "HEAD" else answer.body
        self._transport.write(_head(answer, keep_alive=request.keep_alive) + body)
        if not request.keep_alive:
            self._transport.close()

    def _refuse(self, status: int, message: str) -> None:
        answer = refusal(status, message)
        self._transport.write(_head(answer, keep_alive=False) + answer.body)
        self._transport.close()

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES and not self._transport.is_closing():
            self._refuse(431, f"the headers have more than {MAX_HEAD_BYTES} bytes")


def _head(answer: Answer, *, keep_alive: bool) -> bytes:
    return b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\nconnection: %s\r\n\r\n" % (
        answer.status,
        HTTPStatus(answer.status).phrase.encode(),
        answer.content_type,
        len(answer.body),
        b"keep-alive" if keep_alive else b"close",
    )
