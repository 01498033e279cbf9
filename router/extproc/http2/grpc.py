# SPDX-License-Identifier: Apache-2.0
"""gRPC on one HTTP/2 stream: messages as bytes, a status at the end. No I/O.

Framing and status: grpc/grpc ``doc/PROTOCOL-HTTP2.md``. Compressed messages are refused, since none was offered;
``grpc-timeout`` is the client's to enforce, which it does by ending the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Protocol
from urllib.parse import quote

from router.extproc.http2.hpack import Headers, literal
from router.extproc.http2.sending import Sender
from router.extproc.http2.streams import Stream

_PREFIX_BYTES = 5
_STATUS_200 = b"\x88"
_CONTENT_TYPE = literal(b"content-type", b"application/grpc")
_BEGIN = _STATUS_200 + _CONTENT_TYPE


class Status(IntEnum):
    """Those that are sent (grpc/grpc ``doc/statuscodes.md``)."""

    OK = 0
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


_OK = literal(b"grpc-status", b"0")


class Handler(Protocol):
    """Serves one call. ``gone`` comes at most once, and nothing comes after it, nor after ``Call.finish``."""

    def message(self, data: bytes) -> None:
        """The next message, whole."""

    def half_closed(self) -> None:
        """The client sends no more."""

    def gone(self) -> None:
        """Nobody hears the answer any more."""


MakeHandler = Callable[["Call"], Handler]


class Call:
    """One call: cuts the stream into messages for its handler, and writes what that answers."""

    def __init__(
        self,
        out: Sender,
        stream: Stream,
        max_message_bytes: int,
        notify: Callable[[], None],
        on_over: Callable[[Call], None],
    ) -> None:
        """``notify`` is called when there is something to be sent, ``on_over`` once, when the call is over."""
        self._out = out
        self._stream = stream
        self._max_message_bytes = max_message_bytes
        self._notify = notify
        self._on_over = on_over
        self._parts = bytearray()
        self._needed_bytes = 0
        """Less than that of ``_parts`` is no message."""
        self._begun = False
        self.handler: Handler | None = None
        self.over = False

    # What comes

    def data(self, data: bytes) -> None:
        if self.over or self.handler is None:
            return
        if self._parts:
            self._parts += data
            if len(self._parts) < self._needed_bytes:
                return
            come: bytes | memoryview = memoryview(self._parts)
            self._parts = bytearray()
        else:
            come = data
        at, end, handler = 0, len(come), self.handler
        self._needed_bytes = _PREFIX_BYTES
        while end - at >= _PREFIX_BYTES:
            length = int.from_bytes(come[at + 1 : at + _PREFIX_BYTES], "big")
            if come[at] or length > self._max_message_bytes:
                self._refuse_message(compressed=bool(come[at]))
                return
            start = at + _PREFIX_BYTES
            if end - start < length:
                self._needed_bytes = _PREFIX_BYTES + length
                break
            at = start + length
            handler.message(bytes(come[start:at]))
            if self.over:
                return
        if at < end:
            self._parts += come[at:]

    def ended(self) -> None:
        if self.over or self.handler is None:
            return
        if self._parts:
            self.cut(Status.INTERNAL, "the stream ended within a message")
        else:
            self.handler.half_closed()

    def gone(self) -> None:
        if not self.over:
            handler = self._end()
            if handler is not None:
                handler.gone()

    def _refuse_message(self, *, compressed: bool) -> None:
        if compressed:
            self.cut(Status.UNIMPLEMENTED, "compressed messages are not taken")
        else:
            self.cut(Status.RESOURCE_EXHAUSTED, "a message above the limit")

    def _end(self) -> Handler | None:
        """The call is over; returns who served it. It is let go: both in a circle would be garbage after each call."""
        handler, self.handler = self.handler, None
        self.over = True
        self._parts = bytearray()
        self._on_over(self)
        return handler

    # What is answered

    def write(self, message: bytes) -> None:
        """Answer with a message."""
        if self.over:
            return
        if not self._begun:
            self._begun = True
            self._out.begin(self._stream, _BEGIN)
        self._out.send(self._stream, (b"\0", len(message).to_bytes(4, "big"), message))
        self._notify()

    def finish(self, status: Status = Status.OK, text: str = "") -> None:
        """End the call."""
        if self.over:
            return
        self._end()
        block = _OK if status is Status.OK else literal(b"grpc-status", str(int(status)).encode())
        if text:
            block += literal(b"grpc-message", quote(text, safe=" '(),:;").encode())
        self._out.end(self._stream, block if self._begun else _BEGIN + block)
        self._notify()

    def cut(self, status: Status, text: str) -> None:
        """End the call from our side, and tell its handler."""
        handler = self.handler
        if not self.over:
            self.finish(status, text)
            if handler is not None:
                handler.gone()


def open_call(
    out: Sender,
    stream: Stream,
    headers: Headers,
    methods: Mapping[bytes, MakeHandler],
    max_message_bytes: int,
    notify: Callable[[], None],
    on_over: Callable[[Call], None],
) -> Call:
    """The call that a new stream is; answered at once where there is no such method."""
    call = Call(out, stream, max_message_bytes, notify, on_over)
    fields = dict(headers)
    make = methods.get(fields.get(b":path", b""))
    if fields.get(b":method") != b"POST" or not fields.get(b"content-type", b"").startswith(
        b"application/grpc"
    ):
        call.over = True
        out.end(stream, b"\x08\x03415")  # :status 415, by the name of entry 8
        on_over(call)
        notify()
    elif make is None:
        call.finish(Status.UNIMPLEMENTED, "no such method")
    else:
        call.handler = make(call)
    return call
