# SPDX-License-Identifier: Apache-2.0
"""One writer per file, found out at start: a lock beside it, which its owner's death releases, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class WriterLockedError(OSError):
    """Another process writes this file. ``pid``: who; None where it could not be told."""

    def __init__(self, path: Path, pid: int | None) -> None:
        who = "another process" if pid is None else f"process {pid}"
        super().__init__(f"{path} is written by {who}")
        self.path, self.pid = path, pid


class WriterLock:
    """Held from being made until ``release``, or until nobody refers to it.

    A lock (``flock``) of ``.NAME.lock`` beside the file, which holds the owner's process id and goes with the lock. A
    file that a dead owner left is taken over.
    """

    def __init__(self, path: Path) -> None:
        """Take it.

        Raises:
            WriterLockedError: another process has it.
            OSError: the file cannot be made.
        """
        self._beside = path.with_name(f".{path.name}.lock")
        self._descriptor = _locked(path, self._beside)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others write. Twice is fine."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                self._beside.unlink()
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.release()


def _locked(path: Path, beside: Path) -> int:
    while True:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(descriptor, beside):
                return descriptor
        except BlockingIOError:
            pid = _pid(descriptor)
            os.close(descriptor)
            raise WriterLockedError(path, pid) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner removed it just now


def _is_there(descriptor: int, beside: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(beside))
    except FileNotFoundError:
        return False


def _pid(descriptor: int) -> int | None:
    try:
        return int(os.pread(descriptor, 32, 0))
    except ValueError:
        return None
