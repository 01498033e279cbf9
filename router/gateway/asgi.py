# SPDX-License-Identifier: Apache-2.0
"""ASGI types and the moves shared by all answers: read a bounded body, send a whole answer, notice a lost client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Self

from router.gateway.headers import REQUEST_ID, Headers
from router.gateway.refusal import BodyTooLargeError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGoneError(Exception):
    """The client closed its connection."""


async def read_body(receive: Receive, headers: Headers, max_bytes: int) -> bytes:
    """Read the request body.

    Raises:
        BodyTooLargeError: announced or actual size is above ``max_bytes``.
        ClientGoneError: the client left before its body was complete.
    """
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise _too_large(max_bytes)
    pieces: list[bytes] = []
    size_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece: bytes = message.get("body", b"")
        size_bytes += len(piece)
        if size_bytes > max_bytes:
            raise _too_large(max_bytes)
        if piece:
            pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def send_json(send: Send, status: int, body: bytes, request_id: str, more: Headers = ()) -> None:
    """Send a whole JSON answer."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode("ascii")),
        (REQUEST_ID, request_id.encode("ascii", "replace")),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class WhileClientStays:
    """Cancels the block it surrounds as soon as the client disconnects, and swallows that cancellation.

    It is a time-out that never runs out by itself: ``asyncio.timeout`` keeps this cancellation apart from the
    server's own and from time-outs inside the block.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._scope = asyncio.timeout(None)
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start to listen. The request body must have been read."""
        await self._scope.__aenter__()
        self._watch = asyncio.get_running_loop().create_task(self._wait())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Stop listening; a cancellation that came from here ends here."""
        if self._watch is not None:
            self._watch.cancel()
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            return True
        return False

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._scope.reschedule(asyncio.get_running_loop().time())


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request body is larger than {max_bytes} bytes")
