# SPDX-License-Identifier: Apache-2.0
"""Jobs of the scheduler, cut into parts that threads finish. Thread-safe.

A thread touches the engine's memory only inside `with job.touching()`, for one copy between it and a buffer of its own.
Closing a job waits for such a copy (microseconds) and forbids the next. So a job can fail at its deadline while a
read hangs in the file system: when that read comes back, its bytes have nowhere to go. No block needs quarantine.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class JobKind(Enum):
    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A job is over. `good_keys` are in place; `late` if its deadline ended it."""

    job_id: int
    kind: JobKind
    keys: tuple[bytes, ...]
    good_keys: tuple[bytes, ...]
    size_bytes: int
    seconds: float
    late: bool

    @property
    def success(self) -> bool:
        return len(self.good_keys) == len(self.keys)


class Job:
    def __init__(
        self, job_id: int, kind: JobKind, keys: Sequence[bytes], parts: int, deadline_s: float
    ) -> None:
        self.job_id = job_id
        self.kind = kind
        self.keys = tuple(keys)
        self.deadline_s = deadline_s
        self._submitted_s = time.monotonic()
        self._lock = threading.Lock()
        self._open = True
        self._parts = parts
        self._good: list[bytes] = []
        self._size_bytes = 0

    @property
    def wanted(self) -> bool:
        return self._open

    @contextlib.contextmanager
    def touching(self) -> Iterator[bool]:
        """Whether the engine's memory may be touched; it stays the job's until the end of the block."""
        with self._lock:
            yield self._open

    def part_done(self, good_keys: Sequence[bytes], size_bytes: int) -> bool:
        """True if it was the last part and the job is still open: then the caller hands it in."""
        with self._lock:
            if not self._open:
                return False
            self._good += good_keys
            self._size_bytes += size_bytes
            self._parts -= 1
            return self._parts == 0

    def close(self) -> Outcome | None:
        """What it came to; None if it was closed before. Nothing touches the engine's memory any more."""
        with self._lock:
            if not self._open:
                return None
            self._open = False
            seconds = time.monotonic() - self._submitted_s
            late = self._parts > 0
            return Outcome(
                self.job_id, self.kind, self.keys, tuple(self._good), self._size_bytes, seconds, late
            )
