# SPDX-License-Identifier: Apache-2.0
"""What happened, for metrics: sums since the last `take`. Thread-safe."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Sums:
    """Differences since the last take."""

    read_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_blocks: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    evictions: int = 0
    evicted_bytes: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    """By kind: missing, defective, ledger_busy, no_room, disk_full, io, internal, evict, scan, deadline."""
    refused: dict[str, int] = field(default_factory=dict)
    """Blocks by reason: queue, degraded."""

    def __bool__(self) -> bool:
        return any(getattr(self, one.name) for one in fields(self))


class Counts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = Sums()

    def take(self) -> Sums:
        with self._lock:
            sums, self._sums = self._sums, Sums()
            return sums

    def read(self, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._sums.read_blocks += 1
            self._sums.read_bytes += size_bytes
            self._sums.read_seconds += seconds

    def wrote(self, blocks: int, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._sums.written_blocks += blocks
            self._sums.written_bytes += size_bytes
            self._sums.write_seconds += seconds

    def evicted(self, size_bytes: int) -> None:
        with self._lock:
            self._sums.evictions += 1
            self._sums.evicted_bytes += size_bytes

    def error(self, kind: str) -> None:
        with self._lock:
            self._sums.errors[kind] = self._sums.errors.get(kind, 0) + 1

    def refuse(self, reason: str, blocks: int) -> None:
        with self._lock:
            self._sums.refused[reason] = self._sums.refused.get(reason, 0) + blocks
