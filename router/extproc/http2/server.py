# SPDX-License-Identifier: Apache-2.0
"""A gRPC server on asyncio: sockets, TLS, keepalive and an orderly end, around ``connection`` and ``grpc``.

Answers that are made while a read is handled go out in one write, unless that takes longer than ``LINGER_S``, and so do
those made in one turn of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Mapping
from time import monotonic
from typing import cast

from router.extproc.http2.connection import Connection
from router.extproc.http2.grpc import Call, MakeHandler, Status, open_call
from router.extproc.http2.hpack import Headers
from router.extproc.http2.streams import Stream

KEEPALIVE_S = 30.0
"""A peer that says nothing for so long is asked; one that says nothing for as long again is gone."""
LINGER_S = 0.0005
"""Answers wait no longer for others that are made of the same read."""
_BACKLOG = 1024
_LOOK_S = 0.02


class GrpcServer:
    """Serves methods by path on one listening socket."""

    def __init__(
        self,
        methods: Mapping[bytes, MakeHandler],
        max_message_bytes: int,
        *,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        self._methods = methods
        self._max_message_bytes = max_message_bytes
        self._keepalive_s = keepalive_s
        self._wires: set[_Wire] = set()
        self._server: asyncio.Server | None = None
        self._keepalive: asyncio.TimerHandle | None = None
        self._calls: set[Call] = set()

    async def open(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serve what connects to a bound socket, which is closed with the server."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Wire(self), sock=listener, ssl=tls, backlog=_BACKLOG)
        self._keepalive = loop.call_later(self._keepalive_s, self._look_around)

    async def close(self, grace_s: float) -> None:
        """No new connections and calls; open calls may go on for so long, and are then cut."""
        if self._server is None:
            return
        self._server.close()
        for wire in self._wires:
            wire.refuse_new()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while any(wire.connection.streams for wire in self._wires):  # noqa: ASYNC110 - once in a life
                    await asyncio.sleep(_LOOK_S)
        for call in [*self._calls]:
            call.cut(Status.UNAVAILABLE, "the server ends")
        if self._keepalive is not None:
            self._keepalive.cancel()
        for wire in [*self._wires]:
            wire.close()
        await self._server.wait_closed()
        self._server = None

    @property
    def open_calls(self) -> int:
        """Calls that are not over."""
        return len(self._calls)

    def joined(self, wire: _Wire) -> None:
        self._wires.add(wire)

    def left(self, wire: _Wire) -> None:
        self._wires.discard(wire)

    def accept(self, wire: _Wire, stream: Stream, headers: Headers) -> Call:
        call = open_call(
            wire.connection.out,
            stream,
            headers,
            self._methods,
            self._max_message_bytes,
            wire.wants_flush,
            self._calls.discard,
        )
        if not call.over:
            self._calls.add(call)
        return call

    def _look_around(self) -> None:
        for wire in [*self._wires]:
            wire.check_alive()
        self._keepalive = asyncio.get_running_loop().call_later(self._keepalive_s, self._look_around)


class _Wire(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._reading = self._will_flush = False
        self._flushed_s = 0.0
        self._heard = -1
        self._asked = False
        self.connection = Connection(self._accept)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.joined(self)
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._server.left(self)
        self.connection.lost()

    def data_received(self, data: bytes) -> None:
        self._reading, self._flushed_s = True, monotonic()
        try:
            self.connection.receive(data)
        finally:
            self._reading = False
        self._flush()

    def pause_writing(self) -> None:
        self.connection.out.room = False

    def resume_writing(self) -> None:
        self.connection.out.has_room()
        self._flush()

    def wants_flush(self) -> None:
        """Something is to be sent, at the latest in the next turn of the loop."""
        if self._reading:
            if monotonic() - self._flushed_s > LINGER_S:
                self._flush()
                self._flushed_s = monotonic()
        elif not self._will_flush:
            self._will_flush = True
            asyncio.get_running_loop().call_soon(self._flush)

    def refuse_new(self) -> None:
        self.connection.refuse_new()
        self._flush()

    def close(self) -> None:
        """Send what is there, then end."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def check_alive(self) -> None:
        if self.connection.heard != self._heard:
            self._heard, self._asked = self.connection.heard, False
        elif self._asked:
            if self._transport is not None:
                self._transport.abort()
        else:
            self._asked = True
            self.connection.out.probe()
            self._flush()

    def _accept(self, stream: Stream, headers: Headers) -> Call:
        return self._server.accept(self, stream, headers)

    def _flush(self) -> None:
        self._will_flush = False
        if self._transport is None:
            return
        out = self.connection.out
        if out.has_output:
            self._transport.write(b"".join(out.take_output()))
        if self.connection.over:
            self._transport.close()
