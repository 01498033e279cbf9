# SPDX-License-Identifier: Apache-2.0
"""Messages on a byte stream between processes of one host: four bytes of length, then MessagePack.

Both ends are of the same version (one supervisor starts them all), so the layout may change with it.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Generic, TypeVar

import msgspec

_LENGTH = struct.Struct(">I")
_MOST_BYTES = 2**30
_T = TypeVar("_T")

_encode = msgspec.msgpack.Encoder().encode


def frame(message: object) -> bytes:
    """One message, ready to be written."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[_T]):
    """Reads messages of one type."""

    def __init__(self, reader: asyncio.StreamReader, kind: type[_T]) -> None:
        """``kind`` may be a union of tagged structs."""
        self._reader = reader
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(kind)

    async def next(self) -> _T | None:
        """The next message; None where the other end is gone.

        Raises:
            msgspec.DecodeError: it is none of ours.
        """
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            (size,) = _LENGTH.unpack(head)
            if size > _MOST_BYTES:
                raise msgspec.DecodeError(f"a message of {size} bytes")
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return self._decoder.decode(body)
