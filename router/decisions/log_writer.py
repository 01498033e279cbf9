# SPDX-License-Identifier: Apache-2.0
"""Writes the decision log in a thread of its own.

The event loop only appends bytes to a queue, so no request ever waits for a disk. When the disk takes nothing for so
long that the queue is full, one of two promises must give: that no request waits, or that no line is lost. Requests
go on, since a log explains the service and is not it; each lost line is counted in
``pointsman_decision_log_dropped_total``, and a ``dropped`` line says in the log itself how many are missing and
where. Before that happens ``degraded`` names what the disk says, and `/ready` and the metrics show it.

A write that fails is retried every ``_RETRY_S``, from the first line that is not in the file. ``stop`` writes
everything that is queued.

fsync ``always`` comes after every batch, ``interval`` once a second while lines come, ``never`` leaves it to the
kernel (then a kill of the process still loses nothing that was written, a loss of power may).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

from router.decisions.lines import dropped_line

_log = logging.getLogger(__name__)

FsyncPolicy = Literal["never", "interval", "always"]

_MOST_QUEUED_BYTES = 64 * 2**20
_BATCH_BYTES = 2**20
_GATHER_S = 0.01  # lines of this long go out in one write; a killed process loses no more than that
_SYNC_S = 1.0
_RETRY_S = 1.0
_STOP_S = 10.0


class AppendsLines(Protocol):
    """``log_file.LogFile``, or what a test puts in its place."""

    def append(self, lines: bytes) -> int: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class LogWriter:
    """``write`` is for one thread, the event loop's; counters may be read from any."""

    def __init__(
        self,
        file: AppendsLines,
        fsync: FsyncPolicy,
        monotonic_s: Callable[[], float],
        most_queued_bytes: int = _MOST_QUEUED_BYTES,
    ) -> None:
        self._file = file
        self._fsync = fsync
        self._monotonic_s = monotonic_s
        self._most_queued_bytes = most_queued_bytes
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._taken_bytes = 0
        self._unsaid = 0
        self._rest = b""
        self._synced_s = monotonic_s()
        self._is_synced = True
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """Lines that are not in the log and never will be."""
        self.written_lines = 0
        self.errors = 0
        """Writes that failed."""
        self.degraded: str | None = None
        """What the disk said last, while lines cannot be written."""

    def start(self) -> None:
        """Begin to write."""
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue one line, without its line feed. Never blocks; O(1)."""
        if self._queued_bytes - self._taken_bytes + len(line) > self._most_queued_bytes:
            self.dropped += 1
            self._unsaid += 1
            return
        if self._unsaid:
            self._put(dropped_line(self._unsaid))
            self._unsaid = 0
        self._put(line)
        if not self._work.is_set():
            self._work.set()

    def stop(self) -> None:
        """Write all that is queued, and end. Blocks, ten seconds at most where the disk refuses."""
        if self._unsaid:
            self._put(dropped_line(self._unsaid))
            self._unsaid = 0
        self._stopping.set()
        self._work.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _put(self, line: bytes) -> None:
        self._queue.append(line + b"\n")
        self._queued_bytes += len(line) + 1

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._work.wait(None if self._is_synced else _SYNC_S)
            if self._fsync != "always":
                self._stopping.wait(_GATHER_S)
            self._work.clear()
            self._write_queue()
        self._write_queue()
        self._end()

    def _write_queue(self) -> None:
        while self._rest or self._queue:
            if not self._rest:
                self._rest = self._batch()
            if not self._append():
                if self._stopping.is_set():
                    return
                self._stopping.wait(_RETRY_S)
        self._sync_if_due()

    def _batch(self) -> bytes:
        lines: list[bytes] = []
        size = 0
        while self._queue and size < _BATCH_BYTES:
            lines.append(self._queue.popleft())
            size += len(lines[-1])
        return b"".join(lines)

    def _append(self) -> bool:
        """Whether some of the batch is in the file now."""
        try:
            written = self._file.append(self._rest)
            if written:
                self._is_synced = False
                self.written_lines += self._rest.count(b"\n", 0, written)
                self._rest = self._rest[written:]
                self._taken_bytes += written
            if self._rest:
                raise OSError("no space for whole lines")
            if self._fsync == "always":
                self._sync()
        except OSError as error:
            self.errors += 1
            if self.degraded is None:
                _log.error("the decision log cannot be written: %s", error)
            self.degraded = error.strerror or str(error)
            return False
        if self.degraded is not None:
            _log.warning("the decision log is written again")
            self.degraded = None
        return True

    def _sync_if_due(self) -> None:
        if self._fsync == "never":
            self._is_synced = True
        elif not self._is_synced and self._monotonic_s() - self._synced_s >= _SYNC_S:
            try:
                self._sync()
            except OSError as error:
                self.errors += 1
                self.degraded = error.strerror or str(error)
                self._is_synced = (
                    True  # the kernel has given the pages up; another call would only seem to succeed
                )

    def _sync(self) -> None:
        self._file.sync()
        self._is_synced, self._synced_s = True, self._monotonic_s()

    def _end(self) -> None:
        left = self._rest.count(b"\n") + len(self._queue)
        if left:
            self.dropped += left
            _log.error("%d lines of the decision log could not be written: %s", left, self.degraded)
        if self._fsync != "never":
            self._last(self._file.sync)
        self._last(self._file.close)

    def _last(self, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            self.errors += 1
            _log.error("the decision log could not be closed: %s", error)
