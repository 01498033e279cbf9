# SPDX-License-Identifier: Apache-2.0
"""One HTTP exchange over ASGI, with two things ASGI leaves out: cutting the connection, and hearing of its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from http import HTTPStatus
from urllib.parse import parse_qsl

from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, HTTPScope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_JSON = b"application/json"


class ConnectionGoneError(Exception):
    """The connection is closed; there is nobody to answer."""


class CuttableProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol; puts the transport where the application can reach it."""

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["state"]["transport"] = self.transport


class Connection:
    """One request and its answer."""

    def __init__(
        self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable, number: int
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.number = number
        """Counts the worker's requests, from 1."""
        self.path = scope["path"]
        self.method = scope["method"]
        self.query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        self._headers = dict(scope["headers"])

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers as they came."""
        return list(self._scope["headers"])

    def header(self, name: bytes) -> str | None:
        """One header, by its lower-case name."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            ConnectionGoneError: the client went in the middle of it.
        """
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ConnectionGoneError
            parts.append(message["body"])
            if not message.get("more_body"):
                return b"".join(parts)

    @contextlib.contextmanager
    def watched(self, on_gone: Callable[[], None]) -> Iterator[None]:
        """Call ``on_gone`` when the client closes while the block runs."""

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            on_gone()

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()

    async def answer(
        self, body: bytes, status: HTTPStatus = HTTPStatus.OK, content_type: bytes = _JSON
    ) -> None:
        """A whole answer."""
        headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await self._send(
            {"type": "http.response.start", "status": status.value, "headers": headers, "trailers": False}
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def start_stream(self) -> None:
        """The head of a stream of server-sent events."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await self._send(
            {"type": "http.response.start", "status": 200, "headers": headers, "trailers": False}
        )

    async def send(self, data: bytes) -> None:
        """Some of the stream."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes) -> None:
        """The last of the stream."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def flush(self) -> None:
        """Let what was sent leave, as far as the socket takes it."""
        for _ in range(100):
            if self._transport.get_write_buffer_size() == 0:
                return
            await asyncio.sleep(0.01)

    def drop(self, *, reset: bool = False) -> None:
        """Close the connection without ending the answer: EOF, or a TCP reset."""
        transport = self._transport
        if reset:
            raw = transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            transport.close()

    @property
    def _transport(self) -> asyncio.Transport:
        transport: asyncio.Transport = self._scope["state"]["transport"]
        return transport
