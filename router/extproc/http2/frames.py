# SPDX-License-Identifier: Apache-2.0
"""Frames of HTTP/2 (RFC 9113, sections 4 and 6): names, limits, and how to write those that are sent."""

from __future__ import annotations

import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES: Final = 9
MIN_FRAME_BYTES: Final = 16_384
MAX_FRAME_BYTES: Final = 2**24 - 1
MAX_WINDOW_BYTES: Final = 2**31 - 1
DEFAULT_WINDOW_BYTES: Final = 65_535
MAX_STREAM_ID: Final = 2**31 - 1

DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
FLOW_CONTROL_ERROR: Final = 0x3
STREAM_CLOSED: Final = 0x5
FRAME_SIZE_ERROR: Final = 0x6
CANCEL: Final = 0x8
COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB

_HEADER = struct.Struct(">HBBBL")
_PAIR = struct.Struct(">HL")
_WORD = struct.Struct(">L")


class ConnectionFaultError(Exception):
    """The peer broke the protocol: the connection is over."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame_header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """The nine bytes before a payload."""
    return _HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def read_header(data: bytes | bytearray, at: int) -> tuple[int, int, int, int]:
    """(length, type, flags, stream) of the frame that begins at an index."""
    high, low, kind, flags, stream_id = _HEADER.unpack_from(data, at)
    return high << 8 | low, kind, flags, stream_id & 0x7FFF_FFFF


def settings_frame(values: dict[int, int]) -> bytes:
    payload = b"".join(_PAIR.pack(name, value) for name, value in values.items())
    return frame_header(len(payload), SETTINGS, 0, 0) + payload


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Pairs of a SETTINGS payload, whose length is a multiple of six."""
    return [_PAIR.unpack_from(payload, at) for at in range(0, len(payload), _PAIR.size)]


def window_update(stream_id: int, count: int) -> bytes:
    return frame_header(4, WINDOW_UPDATE, 0, stream_id) + _WORD.pack(count)


def reset(stream_id: int, code: int) -> bytes:
    return frame_header(4, RST_STREAM, 0, stream_id) + _WORD.pack(code)


def goaway(last_stream_id: int, code: int, text: str = "") -> bytes:
    payload = _WORD.pack(last_stream_id) + _WORD.pack(code) + text.encode("ascii", "replace")
    return frame_header(len(payload), GOAWAY, 0, 0) + payload


def ping(payload: bytes, *, ack: bool) -> bytes:
    return frame_header(8, PING, ACK if ack else 0, 0) + payload


def word(payload: bytes) -> int:
    """The first four bytes as a number."""
    value: int = _WORD.unpack_from(payload)[0]
    return value


def unpadded(payload: bytes, flags: int) -> bytes:
    """What is between the length of the padding and the padding.

    Raises:
        ConnectionFaultError: the padding is longer than the payload.
    """
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFaultError(PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]
