# SPDX-License-Identifier: Apache-2.0
"""The other side of an HTTP/2 connection, frame by frame, as a test wants it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from router.extproc.http2 import frames as f
from router.extproc.http2.connection import Connection
from router.extproc.http2.hpack import HeaderDecoder, Headers, literal
from router.extproc.http2.streams import Stream

REQUEST = (
    b"\x83\x86"  # :method POST, :scheme http
    + literal(b":path", b"/echo")
    + literal(b"content-type", b"application/grpc")
)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return f.frame_header(len(payload), kind, flags, stream_id) + payload


def greeting(**settings: int) -> bytes:
    names = {"window": f.INITIAL_WINDOW_SIZE, "frame": f.MAX_FRAME_SIZE}
    return f.PREFACE + f.settings_frame({names[name]: value for name, value in settings.items()})


def headers(stream_id: int = 1, *, end: bool = False, block: bytes = REQUEST) -> bytes:
    return frame(f.HEADERS, f.END_HEADERS | (f.END_STREAM if end else 0), stream_id, block)


def data(payload: bytes, stream_id: int = 1, *, end: bool = False) -> bytes:
    """Frames of a payload of any size."""
    parts = [payload[at : at + 16_384] for at in range(0, len(payload), 16_384)] or [b""]
    return b"".join(
        frame(f.DATA, f.END_STREAM if end and n == len(parts) - 1 else 0, stream_id, part)
        for n, part in enumerate(parts)
    )


def message(payload: bytes) -> bytes:
    return b"\0" + struct.pack(">L", len(payload)) + payload


def frames_of(output: bytes) -> list[tuple[int, int, int, bytes]]:
    """(type, flags, stream, payload) of what was sent."""
    found, at = [], 0
    while at < len(output):
        length, kind, flags, stream_id = f.read_header(output, at)
        at += f.HEADER_BYTES + length
        found.append((kind, flags, stream_id, output[at - length : at]))
    return found


@dataclass
class Kept:
    """Serves a stream by keeping what happens."""

    stream: Stream
    headers: Headers
    got: bytearray = field(default_factory=bytearray)
    happened: list[str] = field(default_factory=list)

    def data(self, data: bytes) -> None:
        assert not self.happened, "data after the end"
        self.got += data

    def ended(self) -> None:
        self.happened.append("ended")

    def gone(self) -> None:
        self.happened.append("gone")


class Talk:
    """A connection and who serves its streams."""

    def __init__(self, **settings: int) -> None:
        self.served: dict[int, Kept] = {}
        self.connection = Connection(self._accept)
        self.sent: list[tuple[int, int, int, bytes]] = []
        self.say(greeting(**settings))

    def _accept(self, stream: Stream, fields: Headers) -> Kept:
        self.served[stream.id] = Kept(stream, fields)
        return self.served[stream.id]

    def say(self, *bytes_: bytes) -> list[tuple[int, int, int, bytes]]:
        """Frames that come back."""
        for one in bytes_:
            self.connection.receive(one)
        return self.hear()

    def hear(self) -> list[tuple[int, int, int, bytes]]:
        news = frames_of(b"".join(self.connection.out.take_output()))
        self.sent += news
        return news

    def body(self, stream_id: int = 1) -> bytes:
        """Data that was sent on a stream so far."""
        return b"".join(payload for kind, _, to, payload in self.sent if kind == f.DATA and to == stream_id)

    def fault(self) -> int | None:
        """Code of the GOAWAY that ended the connection."""
        codes = [f.word(payload[4:]) for kind, _, _, payload in self.sent if kind == f.GOAWAY]
        return codes[-1] if self.connection.over and codes else None


def read_block(block: bytes) -> Headers:
    return HeaderDecoder().decode(block)
