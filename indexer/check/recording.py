# SPDX-License-Identifier: Apache-2.0
"""Reads a recorded event stream: JSON lines, gzipped or not.

Each line is a message ``{"seq": n, "payload": ..., "topic": ...}``. The payload is the third frame in base64, or the
decoded batch, in which ``"hex:..."`` stands for bytes; then the bytes of the frame are encoded again. Other fields
and empty lines are ignored.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

_GZIP_MAGIC = b"\x1f\x8b"
_HEX = "hex:"


class RecordingError(Exception):
    """The file cannot be read as a recording; the message names the line."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One message, with the line it stands on (from 1)."""

    line: int
    topic: str
    seq: int
    payload: bytes


class _Line(Struct):
    seq: int
    payload: str | list[Any]
    topic: str = ""


_decoder = msgspec.json.Decoder(_Line)


def read_recording(path: Path) -> Iterator[Recorded]:
    """Messages in the order of the file.

    Raises:
        RecordingError: the file is missing, cut off, or a line is no message.
    """
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == _GZIP_MAGIC
        with gzip.open(path) if zipped else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _message(number, line)
    except (OSError, EOFError, zlib.error) as error:
        raise RecordingError(str(error)) from error


def _message(number: int, line: bytes) -> Recorded:
    try:
        found = _decoder.decode(line)
        if isinstance(found.payload, str):
            payload = base64.b64decode(found.payload, validate=True)
        else:
            payload = msgspec.msgpack.encode(_with_bytes(found.payload))
        if not 0 <= found.seq < 1 << 64:
            raise ValueError(f"{found.seq} is no sequence number")
    except (msgspec.MsgspecError, binascii.Error, ValueError, OverflowError, RecursionError) as error:
        raise RecordingError(f"line {number} is no message with seq and payload: {error}") from error
    return Recorded(number, found.topic, found.seq, payload)


def _with_bytes(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_HEX):
        return bytes.fromhex(value[len(_HEX) :])
    if isinstance(value, list):
        return [_with_bytes(one) for one in value]
    if isinstance(value, dict):
        return {key: _with_bytes(one) for key, one in value.items()}
    return value
