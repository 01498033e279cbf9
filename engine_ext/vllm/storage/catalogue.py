# SPDX-License-Identifier: Apache-2.0
"""Which block files lie below the root, as far as this process knows, ordered by worth. Pure; not thread-safe.

n files are known. A file is (folder of its fingerprint, its key in hex). The order is a heap whose outdated items are
skipped when they surface and swept when they are most of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from engine_ext.vllm.storage.value import Use

_SWEEP_ABOVE = 1024


class FileId(NamedTuple):
    folder: str
    name: str

    @property
    def shelf(self) -> tuple[str, str]:
        """The directory that it lies in, relative to the root, as two names."""
        return self.folder, self.name[:2]


@dataclass(slots=True)
class Entry:
    """One file. `seen_s` is on the process's monotonic clock."""

    size_bytes: int
    use: Use
    seen_s: float
    serial: int


class Catalogue:
    def __init__(self, half_life_s: float) -> None:
        self.half_life_s = half_life_s
        self._entries: dict[FileId, Entry] = {}
        self._shelves: dict[tuple[str, str], set[FileId]] = {}
        self._heap: list[tuple[float, int, int, FileId]] = []
        self._serial = 0
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[FileId]:
        return iter(self._entries)

    def get(self, file: FileId) -> Entry | None:
        return self._entries.get(file)

    def on_shelf(self, shelf: tuple[str, str]) -> frozenset[FileId]:
        return frozenset(self._shelves.get(shelf, ()))

    def shelves(self) -> frozenset[tuple[str, str]]:
        return frozenset(self._shelves)

    def put(self, file: FileId, size_bytes: int, use: Use, seen_s: float) -> bool:
        """Adds a file or replaces what is known of it; True if it is new. O(log n)."""
        known = self._entries.get(file)
        if known is not None and known.use == use and known.size_bytes == size_bytes:
            known.seen_s = seen_s
            return False
        self._serial += 1
        if known is not None:
            self.total_bytes -= known.size_bytes
        self.total_bytes += size_bytes
        self._entries[file] = Entry(size_bytes, use, seen_s, self._serial)
        self._shelves.setdefault(file.shelf, set()).add(file)
        heapq.heappush(self._heap, self.rank(file, self._entries[file], self.half_life_s))
        if len(self._heap) > 2 * len(self._entries) + _SWEEP_ABOVE:
            self._heap = [item for item in self._heap if self._current(item)]
            heapq.heapify(self._heap)
        return known is None

    def remove(self, file: FileId) -> Entry | None:
        """O(1); its item in the order is skipped later."""
        entry = self._entries.pop(file, None)
        if entry is None:
            return None
        self.total_bytes -= entry.size_bytes
        shelf = self._shelves[file.shelf]
        shelf.discard(file)
        if not shelf:
            del self._shelves[file.shelf]
        return entry

    def pop_cheapest(self) -> tuple[FileId, Entry] | None:
        """Takes out the file with the lowest score; None if there is none. O(log n), amortised."""
        while self._heap:
            _, _, serial, file = heapq.heappop(self._heap)
            entry = self._entries.get(file)
            if entry is not None and entry.serial == serial:
                self.remove(file)
                return file, entry
        return None

    def begin_order(self, half_life_s: float) -> list[tuple[FileId, Entry]]:
        """From now on the order is by another half-life; until `end_order` only files that change are in it. O(n)."""
        self.half_life_s = half_life_s
        self._heap = []
        return list(self._entries.items())

    def end_order(self, ordered: list[tuple[float, int, int, FileId]]) -> None:
        """Rows as `rank` makes them, of what `begin_order` returned; what changed since counts as it is now. O(n)."""
        self._heap += ordered
        heapq.heapify(self._heap)

    @staticmethod
    def rank(file: FileId, entry: Entry, half_life_s: float) -> tuple[float, int, int, FileId]:
        return entry.use.score(entry.size_bytes, half_life_s), -entry.use.depth, entry.serial, file

    def _current(self, item: tuple[float, int, int, FileId]) -> bool:
        entry = self._entries.get(item[3])
        return entry is not None and entry.serial == item[2]

    def faults(self) -> list[str]:
        """Names of broken invariants. O(n)."""
        live = sum(map(self._current, self._heap))
        shelved = {file for shelf in self._shelves.values() for file in shelf}
        wrong = {
            "total": self.total_bytes != sum(entry.size_bytes for entry in self._entries.values()),
            "shelves": shelved != set(self._entries) or not all(self._shelves.values()),
            "order": live != len(self._entries),
        }
        return [name for name, broken in wrong.items() if broken]
