# SPDX-License-Identifier: Apache-2.0
"""A file that lines are appended to and that is rotated by size. Blocking; used by one thread.

Invariant: between calls the file ends with a line feed, so a line is whole or not there. A kill can break it; then
the next start ends the torn line, and readers skip it.

Rotation is one rename, ``PATH`` to ``PATH.n`` with n above all there are; a reader that has the file open goes on
reading it. Two processes must not write one log: the file is locked, and the second one is refused.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from router.decisions.lines import rotated_files


class LogFile:
    """Raises OSError for whatever the disk refuses; the same call may then be made again."""

    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        """``keep`` rotated files stay, the newest."""
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._fd: int | None = None
        self._size = 0

    def open(self) -> None:
        """Open or make the file and lock it.

        Raises:
            OSError: it cannot be written; BlockingIOError: another process writes it.
        """
        if self._fd is not None:
            return
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                os.write(fd, b"\n")
                size += 1
        except OSError:
            os.close(fd)
            raise
        self._fd, self._size = fd, size

    def append(self, lines: bytes) -> int:
        """Write whole lines; returns how many bytes of them are in the file, which is all of them or some whole lines.

        Rotates before it where the file would grow too large.
        """
        if self._fd is not None and self._is_gone():
            self.close()
        self.open()
        if self._size and self._size + len(lines) > self._max_bytes:
            self.rotate()
        fd = self._fd
        if fd is None:
            raise OSError("the log is closed")
        written = os.write(fd, lines)
        if written < len(lines):
            # The disk is full or a limit is met. What is left of a line would be a torn one.
            whole = lines.rfind(b"\n", 0, written) + 1
            os.ftruncate(fd, self._size + whole)
            written = whole
        self._size += written
        return written

    def rotate(self) -> None:
        """Name the present file for good, begin another, and delete what is too many."""
        numbered = rotated_files(self._path)
        newest = max(numbered, default=0) + 1
        self.sync()
        os.replace(self._path, self._path.with_name(f"{self._path.name}.{newest}"))
        self.close()
        self.open()
        self._sync_directory()
        kept = sorted([*numbered, newest])
        for number in kept[: max(len(kept) - self._keep, 0)]:
            self._path.with_name(f"{self._path.name}.{number}").unlink(missing_ok=True)

    def sync(self) -> None:
        """Have it on the disk."""
        if self._fd is not None:
            os.fdatasync(self._fd)

    def close(self) -> None:
        """The lock goes with it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _is_gone(self) -> bool:
        """Whether somebody deleted or moved it: its lines would be lost with it."""
        if self._fd is None:
            return False
        try:
            here = os.stat(self._path)
        except FileNotFoundError:
            return True
        mine = os.fstat(self._fd)
        return (here.st_ino, here.st_dev) != (mine.st_ino, mine.st_dev)

    def _sync_directory(self) -> None:
        fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def check_writable(path: Path) -> None:
    """Open and close it once.

    Raises:
        OSError: it cannot be written; BlockingIOError: another process writes it.
    """
    file = LogFile(path, max_bytes=1, keep=0)
    file.open()
    file.close()
