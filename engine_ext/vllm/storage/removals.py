# SPDX-License-Identifier: Apache-2.0
"""The last block files that anybody removed below one root, noted before they went.

A worker that is killed between an unlink and its event leaves a listener who takes the block for stored. Whoever
starts next says of all that is noted here and not there that it is removed, which does no harm to those who knew.

    0        8            8 + 104              8 + 104 * RECORDS
    +--------+------------+------------+- - - -+
    | noted  | record 0   | record 1   |       |      record: length of the key (1), fingerprint's digest (16), key (<= 87)
    +--------+------------+------------+- - - -+

A ring: record `noted % RECORDS` is written next. Hold the ledger. A note that cannot be written is left out, since its
block must go all the same.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from engine_ext.vllm.storage.catalogue import FileId

REMOVALS_NAME = "pointsman.removed"
RECORDS = 8192
"""More than a worker evicts before its next step says so."""

_COUNT = struct.Struct("<Q")
_RECORD = struct.Struct("<B16s87s")


class Removals:
    """One per process and root."""

    def __init__(self, root: Path) -> None:
        self._path = root / REMOVALS_NAME

    def note(self, file: FileId) -> None:
        """The file is about to go. O(1)."""
        key = bytes.fromhex(file.name)
        if len(key) > _RECORD.size - 17:
            return
        record = _RECORD.pack(len(key), bytes.fromhex(file.folder), key)
        with contextlib.suppress(OSError), self._open(os.O_RDWR | os.O_CREAT) as fd:
            noted = _noted(fd)
            os.pwrite(fd, record, _COUNT.size + noted % RECORDS * _RECORD.size)
            os.pwrite(fd, _COUNT.pack(noted + 1), 0)

    def recent(self, folder: str) -> list[FileId]:
        """Those of one fingerprint, oldest first; whether they are there again is not looked at."""
        found: list[FileId] = []
        with contextlib.suppress(OSError), self._open(os.O_RDONLY) as fd:
            noted = _noted(fd)
            content = os.pread(fd, RECORDS * _RECORD.size, _COUNT.size)
            for number in range(max(noted - RECORDS, 0), noted):
                start = number % RECORDS * _RECORD.size
                record = content[start : start + _RECORD.size]
                if len(record) < _RECORD.size:
                    continue  # the file was cut off
                length, digest, key = _RECORD.unpack(record)
                if digest.hex() == folder and length:
                    found.append(FileId(folder, key[:length].hex()))
        return list(dict.fromkeys(found))

    @contextlib.contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        fd = os.open(self._path, flags | os.O_CLOEXEC, 0o666)
        try:
            yield fd
        finally:
            os.close(fd)


def _noted(fd: int) -> int:
    content = os.pread(fd, _COUNT.size, 0)
    return _COUNT.unpack(content)[0] if len(content) == _COUNT.size else 0
