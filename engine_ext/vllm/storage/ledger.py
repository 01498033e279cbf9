# SPDX-License-Identifier: Apache-2.0
"""How many bytes all workers together keep below one root: a small file, changed under an exclusive `flock`.

    0       8              16              24      28
    +-------+--------------+---------------+-------+
    | magic | total bytes  | written bytes | crc32 |
    +-------+--------------+---------------+-------+

The written bytes only grow: their pace tells how fast the directory turns over.

The lock ends with its holder, so a killed worker blocks nobody; one that is frozen while it holds it makes the others'
stores fail after `wait_s`, nothing else. Only I/O threads come here: every call may block.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from engine_ext.vllm.storage.errors import LedgerBusy

LEDGER_NAME = "pointsman.ledger"

_MAGIC = b"PMLEDGR\n"
_FIELDS = struct.Struct("<8sQQ")
_CHECK = struct.Struct("<I")
_POLL_S = 0.002


class Ledger:
    """One per process and root."""

    def __init__(self, root: Path, wait_s: float) -> None:
        self._path = root / LEDGER_NAME
        self._wait_s = wait_s
        self._threads = threading.Lock()
        self._fd: int | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[Ledger]:
        """The exclusive lock, against this process's threads and other processes.

        Raises:
            LedgerBusy: somebody else has held it all the time.
            OSError: the file system refuses the file or the lock.
        """
        deadline_s = time.monotonic() + self._wait_s
        if not self._threads.acquire(timeout=self._wait_s):
            raise LedgerBusy(f"no other thread gave up {self._path} within {self._wait_s:g} s")
        try:
            fd = self._open()
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        message = f"no other worker gave up {self._path} within {self._wait_s:g} s"
                        raise LedgerBusy(message) from None
                    time.sleep(_POLL_S)
            try:
                yield self
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def read(self) -> int | None:
        """The total; None if nobody has written it or what is there is damaged. Call it while held."""
        fields = self._read()
        return None if fields is None else fields[0]

    def read_written(self) -> int:
        """Bytes of files that have appeared since the ledger was made. Call it while held."""
        fields = self._read()
        return 0 if fields is None else fields[1]

    def _read(self) -> tuple[int, int] | None:
        content = os.pread(self._open(), _FIELDS.size + _CHECK.size, 0)
        if len(content) != _FIELDS.size + _CHECK.size:
            return None
        magic, total, written = _FIELDS.unpack(content[: _FIELDS.size])
        (check,) = _CHECK.unpack(content[_FIELDS.size :])
        valid = magic == _MAGIC and zlib.crc32(content[: _FIELDS.size]) == check
        return (int(total), int(written)) if valid else None

    def write(self, total_bytes: int, written_bytes: int = 0) -> None:
        """Call it while held."""
        fields = _FIELDS.pack(_MAGIC, max(total_bytes, 0), written_bytes)
        os.pwrite(self._open(), fields + _CHECK.pack(zlib.crc32(fields)), 0)

    def file_system_now_s(self) -> float:
        """The clock of the file system's server, by touching the file. Call it while held."""
        fd = self._open()
        os.utime(fd)
        return os.fstat(fd).st_mtime

    def close(self) -> None:
        """Gives up the file; waits for nobody."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _open(self) -> int:
        """The descriptor, of the file that is at the path now: an operator may have emptied the root."""
        if self._fd is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(self._path.stat(), os.fstat(self._fd)):
                    return self._fd
            self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return self._fd
