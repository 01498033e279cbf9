# SPDX-License-Identifier: Apache-2.0
"""The bytes of a snapshot, the same in a file and between replicas.

    "PMINDEX1"                    8 bytes; the digit is the version
    u32 length | header           msgpack of ``Header``
    u32 length | worker           msgpack of ``WorkerSection``, once per worker
    u32 0      | checksum         BLAKE2b, 32 bytes, of everything before it

Lengths are little-endian. A snapshot is taken whole or refused with a ``Refused`` reason: one with another key of the
request hashes says nothing here, and another format of records is not guessed at.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import IO

import msgspec

MAGIC = b"PMINDEX1"
CHECKSUM_BYTES = 32
_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 0xFFFF_FFFF


class Refused(enum.StrEnum):
    """Why a snapshot is not used."""

    OTHER_VERSION = "other_version"
    OTHER_KEY = "other_key"
    OTHER_FORMAT = "other_format"
    DAMAGED = "damaged"
    TOO_LARGE = "too_large"
    UNREACHABLE = "unreachable"


class SnapshotError(Exception):
    """A snapshot that is not used; nothing of it was."""

    def __init__(self, reason: Refused, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason


class Header(msgspec.Struct, frozen=True):
    """Whose hashes these are, and of what kind the records."""

    key_id: str
    records: str
    """``PrefixIndex.export_format``."""
    unix_s: float


class StreamSection(msgspec.Struct, frozen=True):
    """One event stream of a worker, and up to where it was applied."""

    dp_rank: int
    endpoint: str
    seq: int
    digest: int
    process_start_time_s: float | None = None


class RankSection(msgspec.Struct, frozen=True):
    """What one rank holds."""

    records: bytes
    block_size: int
    partial: str | None = None
    """Why its history is incomplete."""


class WorkerSection(msgspec.Struct, frozen=True):
    """A worker; it is known again by its model and the addresses of its streams."""

    model: str
    plain: bool
    streams: list[StreamSection]
    ranks: list[RankSection]
    store: bytes

    @property
    def identity(self) -> tuple[str, bool, tuple[tuple[int, str], ...]]:
        return self.model, self.plain, tuple((one.dp_rank, one.endpoint) for one in self.streams)


_encode = msgspec.msgpack.Encoder().encode
_header = msgspec.msgpack.Decoder(Header)
_worker = msgspec.msgpack.Decoder(WorkerSection)


def encode_worker(section: WorkerSection) -> bytes:
    """One worker as a frame's payload."""
    return _encode(section)


def write(file: IO[bytes], header: Header, workers: Iterable[bytes]) -> int:
    """Write a snapshot of workers that ``encode_worker`` made; returns its size in bytes.

    Raises:
        OSError: the file cannot be written.
    """
    size = 0
    for part in pieces(header, workers):
        file.write(part)
        size += len(part)
    return size


def pieces(header: Header, workers: Iterable[bytes]) -> Iterator[bytes]:
    """A snapshot in pieces, in order."""
    digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    for part in (MAGIC, *_frame(_encode(header))):
        digest.update(part)
        yield part
    for worker in workers:
        for part in _frame(worker):
            digest.update(part)
            yield part
    digest.update(_LENGTH.pack(0))
    yield _LENGTH.pack(0)
    yield digest.digest()


def read(file: IO[bytes], key_id: str, records: str, max_bytes: int) -> list[WorkerSection]:
    """The workers of a snapshot.

    Raises:
        SnapshotError: it is not used, and why.
        OSError: the file cannot be read.
    """
    reader = _Reader(file, max_bytes)
    magic = reader.take(len(MAGIC))
    if magic[:-1] != MAGIC[:-1]:
        raise SnapshotError(Refused.DAMAGED, "this is no snapshot")
    if magic != MAGIC:
        raise SnapshotError(Refused.OTHER_VERSION, f"version {magic[-1:]!r} where {MAGIC[-1:]!r} is read")
    try:
        header = _header.decode(reader.frame())
        if header.key_id != key_id:
            raise SnapshotError(Refused.OTHER_KEY, f"its hashes are of key {header.key_id}, ours of {key_id}")
        if header.records != records:
            raise SnapshotError(Refused.OTHER_FORMAT, f"its records are {header.records}, ours {records}")
        workers = []
        while payload := reader.frame():
            workers.append(_worker.decode(payload))
    except msgspec.MsgspecError as error:
        raise SnapshotError(Refused.DAMAGED, str(error)) from error
    expected = reader.digest.digest()
    if reader.take(CHECKSUM_BYTES) != expected:
        raise SnapshotError(Refused.DAMAGED, "its checksum is another")
    return workers


class _Reader:
    """Takes exactly so many bytes, bounded in all, and sums them up."""

    def __init__(self, file: IO[bytes], max_bytes: int) -> None:
        self._file = file
        self._left_bytes = max_bytes
        self.digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)

    def take(self, size: int) -> bytes:
        if size > self._left_bytes:
            raise SnapshotError(Refused.TOO_LARGE, "it is longer than the limit")
        self._left_bytes -= size
        data = self._file.read(size)
        if len(data) != size:
            raise SnapshotError(Refused.DAMAGED, "it ends early")
        self.digest.update(data)
        return data

    def frame(self) -> bytes:
        (length,) = _LENGTH.unpack(self.take(_LENGTH.size))
        return self.take(length) if length else b""


def _frame(payload: bytes) -> tuple[bytes, bytes]:
    if len(payload) > _MAX_FRAME_BYTES:
        raise SnapshotError(Refused.TOO_LARGE, "one worker takes more than 4 GiB")
    return _LENGTH.pack(len(payload)), payload
