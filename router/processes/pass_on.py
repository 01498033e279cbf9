# SPDX-License-Identifier: Apache-2.0
"""Everything but requests to models, in a process that serves: passed on to the keeper, who knows the whole.

``/health`` is about this process. ``/ready`` is answered here while there is no keeper: requests are served then too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from router.app import Receive, Scope, Send
from router.processes.client_address import HEADER

_LIMIT_S = 30.0
_HOP = {
    b"connection",
    b"keep-alive",
    b"transfer-encoding",
    b"content-length",
    b"host",
    b"te",
    b"upgrade",
    HEADER,
}
_JSON = [(b"content-type", b"application/json")]


class PassOn:
    """An ASGI app."""

    def __init__(self, path: Path, most_bytes: int, process: int) -> None:
        """``path`` of the keeper's HTTP socket, ``most_bytes`` of a body, the number of this ``process``."""
        self._health = {"status": "ok", "process": process, "pid": os.getpid()}
        self._path = path
        self._most_bytes = most_bytes
        self._session: aiohttp.ClientSession | None = None
        self.is_keeper_there: Callable[[], bool] = lambda: True
        self.ready_without: Callable[[], dict[str, Any]] = lambda: {"ready": False}
        """What is said of ``/ready`` while there is no keeper."""

    async def close(self) -> None:
        """No more calls are passed on."""
        if self._session is not None:
            await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/health":
            await _answer(send, HTTPStatus.OK, _JSON, msgspec.json.encode(self._health))
            return
        if self.is_keeper_there():
            try:
                await self._pass_on(scope, receive, send)
                return
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass  # it has just died
        await self._without(scope, send)

    async def _without(self, scope: Scope, send: Send) -> None:
        if scope["path"] == "/ready":
            view = self.ready_without()
            status = HTTPStatus.OK if view["ready"] else HTTPStatus.SERVICE_UNAVAILABLE
            await _answer(send, status, _JSON, msgspec.json.encode(view))
            return
        message = "the process that knows the whole is being started again"
        body = {"error": {"message": message, "type": "KeeperAway", "code": 503}}
        await _answer(send, HTTPStatus.SERVICE_UNAVAILABLE, _JSON, msgspec.json.encode(body))

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._open()
        headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in scope["headers"] if n not in _HOP]
        client = scope.get("client")
        headers.append((HEADER.decode(), client[0] if client else ""))
        query = scope["query_string"].decode("latin-1")
        target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        has_body = scope["method"] in {"POST", "PUT"}
        async with asyncio.timeout(_LIMIT_S):
            body = await self._body(receive) if has_body else None
            if body is not None and len(body) > self._most_bytes:
                await _answer(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, [], b"")
                return
            async with session.request(
                scope["method"],
                URL(f"http://keeper{target}", encoded=True),
                headers=headers,
                data=body,
                allow_redirects=False,
            ) as answer:
                got = await answer.read()
        kept = [(n, v) for n, v in answer.raw_headers if n.lower() not in _HOP]
        await _answer(send, answer.status, kept, got)

    async def _body(self, receive: Receive) -> bytes:
        """No more is kept than is passed on."""
        body = bytearray()
        async for piece in _pieces(receive):
            body += piece
            if len(body) > self._most_bytes:
                break
        return bytes(body)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self._path)), auto_decompress=False
            )
        return self._session


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": int(status), "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
