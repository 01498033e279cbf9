# SPDX-License-Identifier: Apache-2.0
"""A snapshot in a file: read at start, written now and then and at the end, always whole under its name."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from indexer.snapshot.format import SnapshotError, read
from indexer.snapshot.making import Made, SnapshotMaker
from indexer.snapshot.sections import Recalled
from indexer.writer_lock import WriterLock, WriterLockedError

log = logging.getLogger(__name__)

FROM_FILE = "snapshot"
_HEADROOM_BYTES = 2**20  # header, lengths and checksum beyond the workers themselves


@dataclass(slots=True)
class SnapshotState:
    """What became of the file, for whoever asks."""

    path: str
    loaded_workers: int = 0
    refused: str | None = None
    saved_at_unix_s: float | None = None
    saved_bytes: int = 0
    saved_workers: int = 0
    left_out: list[str] = field(default_factory=list)
    failed: str | None = None
    """Why the newest one could not be written."""


class SnapshotFile:
    """``start`` and ``stop`` once each, on one event loop; ``stop`` before the subscriber ends."""

    def __init__(self, path: Path, maker: SnapshotMaker, interval_s: float) -> None:
        self.state = SnapshotState(str(path))
        self._path = path
        self._maker = maker
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self._lock: WriterLock | None = None

    def claim(self) -> None:
        """Keep others from writing it, until ``stop``.

        Raises:
            WriterLockedError: another process writes it.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(self._path)
        except WriterLockedError:
            raise
        except OSError as error:
            log.warning("snapshot %s cannot be kept from other writers: %s", self._path, error)

    def load(self, recalled: Recalled) -> None:
        """What the file has, for workers that are registered later; a file that is not used is left as it is."""
        limit_bytes = self._maker.max_bytes + _HEADROOM_BYTES
        records = self._maker.holders.index.export_format
        try:
            with self._path.open("rb") as file:
                sections = read(file, self._maker.key_id, records, limit_bytes)
        except FileNotFoundError:
            return
        except SnapshotError as error:
            self.state.refused = str(error)
        except OSError as error:
            self.state.refused = f"unreadable: {error.strerror}"
        else:
            self.state.loaded_workers = len(sections)
            recalled.add(sections, FROM_FILE)
            return
        log.warning("snapshot %s is not used: %s", self._path, self.state.refused)

    def start(self) -> None:
        """Write it from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Write it once more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            await asyncio.to_thread(self.save)
        if self._lock is not None:
            self._lock.release()

    def save(self) -> None:
        """Write it aside and rename it. A snapshot without workers does not replace one that has some."""
        made, aside = Made(), self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(aside, "wb", opener=_private) as file:
                size = sum(file.write(piece) for piece in self._maker.pieces(made))
                file.flush()
                os.fsync(file.fileno())
            if made.workers == 0:
                aside.unlink()
                return
            aside.replace(self._path)
        except (OSError, SnapshotError) as error:
            self.state.failed = str(error)
            log.warning("snapshot %s: %s", self._path, error)
            return
        state = self.state
        state.saved_at_unix_s, state.failed = self._maker.unix_s(), None
        state.saved_bytes, state.saved_workers, state.left_out = size, made.workers, made.left_out

    def view(self) -> dict[str, Any]:
        """The state as plain values."""
        return asdict(self.state)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await asyncio.to_thread(self.save)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
