# SPDX-License-Identifier: Apache-2.0
"""What this process knows of the files below the root, and what it says about them. Thread-safe, no I/O.

Every change of the catalogue that concerns the worker's own fingerprint is announced under the same lock, so a listener
who hears all of it holds the same keys. The lock is never held while somebody does I/O: the scheduler's thread may come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from engine_ext.vllm.storage.announcements import Announcements, Change
from engine_ext.vllm.storage.catalogue import Catalogue, Entry, FileId
from engine_ext.vllm.storage.value import Use


class KnownFiles:
    def __init__(
        self, folder: str, half_life_s: float, report_keys: int, monotonic: Callable[[], float]
    ) -> None:
        self.folder = folder
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._catalogue = Catalogue(half_life_s)
        self._announcements = Announcements(
            report_keys, folder, lambda file: self._catalogue.get(file) is not None
        )
        self._being_read: dict[FileId, int] = {}

    def file_of(self, key: bytes) -> FileId:
        return FileId(self.folder, key.hex())

    @property
    def total_bytes(self) -> int:
        return self._catalogue.total_bytes

    def __len__(self) -> int:
        return len(self._catalogue)

    def keys(self) -> frozenset[bytes]:
        """Of this fingerprint. O(n)."""
        with self._lock:
            return frozenset(
                bytes.fromhex(file.name) for file in self._catalogue if file.folder == self.folder
            )

    def get(self, file: FileId) -> Entry | None:
        with self._lock:
            return self._catalogue.get(file)

    def on_shelf(self, shelf: tuple[str, str]) -> frozenset[FileId]:
        with self._lock:
            return self._catalogue.on_shelf(shelf)

    def shelves(self) -> frozenset[tuple[str, str]]:
        with self._lock:
            return self._catalogue.shelves()

    def seen_within(self, key: bytes, seconds: float) -> bool:
        """Whether the file was there so recently that asking again is not worth it. O(1)."""
        entry = self.get(self.file_of(key))
        return entry is not None and self._monotonic() - entry.seen_s < seconds

    # Changes

    def seen(self, file: FileId, size_bytes: int, use: Use) -> None:
        """The file is there."""
        with self._lock:
            if self._catalogue.put(file, size_bytes, use, self._monotonic()):
                self._announcements.changed(file, removed=False)

    def found(self, file: FileId, size_bytes: int, use: Use) -> None:
        """The file was there when the process started; a report will say so."""
        with self._lock:
            self._catalogue.put(file, size_bytes, use, self._monotonic())

    def touched(self, key: bytes, now_s: float, weight_s: float) -> None:
        """A use that did not touch the file; only this process's order of eviction learns of it."""
        file = self.file_of(key)
        with self._lock:
            entry = self._catalogue.get(file)
            if entry is not None:
                use = entry.use.again(now_s, weight_s, self._catalogue.half_life_s)
                self._catalogue.put(file, entry.size_bytes, use, entry.seen_s)

    @property
    def half_life_s(self) -> float:
        return self._catalogue.half_life_s

    def order_by(self, half_life_s: float) -> None:
        """Another half-life. O(n), most of it without the lock; nobody may evict meanwhile."""
        with self._lock:
            entries = self._catalogue.begin_order(half_life_s)
        ordered = [self._catalogue.rank(file, entry, half_life_s) for file, entry in entries]
        with self._lock:
            self._catalogue.end_order(ordered)

    def forget(self, file: FileId, unless_seen_since_s: float | None = None) -> None:
        """The file is not there."""
        with self._lock:
            entry = self._catalogue.get(file)
            if entry is None or (unless_seen_since_s is not None and entry.seen_s > unless_seen_since_s):
                return
            self._catalogue.remove(file)
            self._announcements.changed(file, removed=True)

    def pop_cheapest(self) -> tuple[FileId, Entry] | None:
        """Takes the file of least worth out; the caller ends with `evicted` or `put_back`."""
        with self._lock:
            return self._catalogue.pop_cheapest()

    def evicted(self, file: FileId) -> None:
        with self._lock:
            self._catalogue.remove(file)
            self._announcements.changed(file, removed=True)

    def put_back(self, file: FileId, size_bytes: int, use: Use) -> None:
        with self._lock:
            self._catalogue.put(file, size_bytes, use, self._monotonic())

    # Reads under way

    def begin_reads(self, keys: Iterable[bytes]) -> None:
        """Keeps files from being evicted by this process until `end_read`."""
        with self._lock:
            for key in keys:
                file = self.file_of(key)
                self._being_read[file] = self._being_read.get(file, 0) + 1

    def end_read(self, key: bytes) -> None:
        file = self.file_of(key)
        with self._lock:
            left = self._being_read.get(file, 0) - 1
            if left > 0:
                self._being_read[file] = left
            else:
                self._being_read.pop(file, None)

    def being_read(self, file: FileId) -> bool:
        with self._lock:
            return file in self._being_read

    # What is said

    def say_gone(self, files: Iterable[FileId]) -> None:
        """Says of those that are not there that they are removed: somebody may have died before he could."""
        with self._lock:
            for file in files:
                if self._catalogue.get(file) is None:
                    self._announcements.changed(file, removed=True)

    def begin_report(self) -> None:
        """Says everything again, in batches."""
        with self._lock:
            self._announcements.begin_report(self._catalogue)

    @property
    def reporting(self) -> bool:
        return self._announcements.reporting

    @property
    def has_news(self) -> bool:
        return self._announcements.pending

    def take_news(self) -> list[Change]:
        with self._lock:
            return self._announcements.take()

    def faults(self) -> list[str]:
        """Names of broken invariants. O(n)."""
        with self._lock:
            return self._catalogue.faults()
