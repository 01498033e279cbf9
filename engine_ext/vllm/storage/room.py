# SPDX-License-Identifier: Apache-2.0
"""Room below the root: bytes are reserved before they are written, and the blocks of least worth make way. I/O threads only.

The ledger's total is what all workers have below the root and are about to write. It is kept by differences, so what a
killed worker had reserved stays in it; `correct` takes that out again.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine_ext.vllm.storage.catalogue import Entry, FileId
from engine_ext.vllm.storage.counts import Counts
from engine_ext.vllm.storage.errors import NoRoom
from engine_ext.vllm.storage.known import KnownFiles
from engine_ext.vllm.storage.ledger import Ledger
from engine_ext.vllm.storage.removals import Removals
from engine_ext.vllm.storage.value import Pace, Use

_PASSES = 4
"""How many scans in a row must find the ledger wrong before it is looked at: others' writes pass, leaks stay."""


@dataclass(slots=True)
class Reservation:
    """Bytes that may be written; `used_bytes` of them have become files."""

    size_bytes: int
    used_bytes: int = 0
    settled: bool = False


class Room:
    def __init__(
        self, root: Path, capacity_bytes: int, ledger: Ledger, known: KnownFiles, counts: Counts, pace: Pace
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.ledger = ledger
        self.total_bytes = 0
        """As this process saw it last."""
        self.removals = Removals(root)
        self.learn_all: Callable[[], None] = lambda: None
        """Reads the whole directory into `known`; called with the ledger held."""
        self._root = root
        self._known = known
        self._counts = counts
        self._pace = pace
        self._reserved_bytes = 0  # changes only while the ledger is held, as the ledger itself
        self._owed: deque[Reservation] = deque()
        self._surpluses: deque[int] = deque(maxlen=_PASSES)

    @contextlib.contextmanager
    def reserve(self, size_bytes: int) -> Iterator[Reservation]:
        """Evicts until so many bytes fit; what has not become a file at the end is given back.

        Raises:
            NoRoom: they do not fit though everything else were evicted.
            LedgerBusy, OSError: nothing was reserved.
        """
        reservation = Reservation(size_bytes)
        with self.ledger.held():
            self._settle_owed()
            total = self.total()
            excess = total + size_bytes - self.capacity_bytes
            if excess > 0:
                total -= self.evict(excess)
            fits = total + size_bytes <= self.capacity_bytes
            self._set(total + size_bytes if fits else total)
            if not fits:
                raise NoRoom(f"{size_bytes} bytes do not fit beside {total} of {self.capacity_bytes}")
            self._reserved_bytes += size_bytes
        try:
            yield reservation
        finally:
            self._owed.append(reservation)
            with self.ledger.held():
                self._settle_owed()

    def settle(self, reservation: Reservation) -> None:
        """Gives back what has not become a file. Hold the ledger, since before the first of the files appeared."""
        if not reservation.settled:
            reservation.settled = True
            total = self.ledger.read()
            self._reserved_bytes -= reservation.size_bytes
            if total is None:
                self._set(self.total())
            else:
                self._set(total + reservation.used_bytes - reservation.size_bytes, reservation.used_bytes)

    def evict(self, at_least_bytes: int) -> int:
        """Unlinks the files of least worth; bytes freed. Hold the ledger, and take them from the total."""
        freed = 0
        kept: list[tuple[FileId, Entry]] = []
        learnt = False
        while freed < at_least_bytes:
            popped = self._known.pop_cheapest()
            if popped is not None:
                freed += self._unlink(*popped, kept)
            elif learnt:
                break
            else:
                learnt = True
                self.learn_all()
        for file, entry in kept:
            self._known.put_back(file, entry.size_bytes, entry.use)
        return freed

    def total(self) -> int:
        """Of the whole root. Hold the ledger."""
        total = self.ledger.read()
        if total is None:
            self.learn_all()
            total = self._known.total_bytes + self._reserved_bytes
        return total

    def enter(self, change_bytes: int) -> None:
        """Hold the ledger."""
        self._set(self.total() + change_bytes)

    def correct(self) -> None:
        """After a scan: the ledger against what was found.

        A scan is not of one moment, so a difference may be others' work meanwhile. One that every scan of several finds is
        looked at again while the ledger is held and nothing can change: too low, the ledger is raised; too high, it is
        lowered by the least surplus of all, since others' reservations end and leaks stay.
        """
        with self.ledger.held():
            self._settle_owed()
            total = self.total()
            self._surpluses.append(total - self._known.total_bytes - self._reserved_bytes)
            self.total_bytes = total
            if len(self._surpluses) < _PASSES or (min(self._surpluses) <= 0 <= max(self._surpluses)):
                return
            self.learn_all()
            surplus = total - self._known.total_bytes - self._reserved_bytes
            self._set(total - (max(min(surplus, *self._surpluses), 0) if surplus > 0 else surplus))
            self._surpluses.clear()

    def _settle_owed(self) -> None:
        """Also of writes that found the ledger busy when they ended."""
        while self._owed:
            self.settle(self._owed.popleft())

    def _set(self, total_bytes: int, appeared_bytes: int = 0) -> None:
        self.total_bytes = max(total_bytes, 0)
        written = self.ledger.read_written() + appeared_bytes
        self.ledger.write(self.total_bytes, written)
        if appeared_bytes and self._pace.note(time.time(), written):
            self._known.order_by(self._pace.half_life_s)

    def _unlink(self, file: FileId, entry: Entry, kept: list[tuple[FileId, Entry]]) -> int:
        """Bytes freed. A file that another worker has used since goes back into the order at its new place."""
        path = self._root / file.folder / file.name[:2] / file.name
        if self._known.being_read(file):
            kept.append((file, entry))
            return 0
        try:
            status = path.stat()
            use = Use.from_mtime_ns(status.st_mtime_ns)
            if use.to_mtime_ns() != entry.use.to_mtime_ns() and use.last_use_s >= entry.use.last_use_s:
                self._known.put_back(file, status.st_size, use)
                return 0
            self.removals.note(file)
            path.unlink()
        except FileNotFoundError:
            self._known.evicted(file)
            return 0
        except OSError:
            self._counts.error("evict")
            kept.append((file, entry))
            return 0
        self._known.evicted(file)
        self._counts.evicted(status.st_size)
        return status.st_size
