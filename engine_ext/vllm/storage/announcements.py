# SPDX-License-Identifier: Apache-2.0
"""What the worker says about its store: each change once, in order, and now and then everything. Pure; not thread-safe.

Invariant: whoever hears every change from the start holds the same keys as the catalogue. A full report says `stored`
again for what is there; it comes in batches, and a file that left meanwhile is left out. A step says a bounded number
of keys, changes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from engine_ext.vllm.storage.catalogue import FileId

CHANGES_PER_REPORT_KEY = 16
"""A step may say so many changes for each key that it may report."""


@dataclass(frozen=True, slots=True)
class Change:
    """Keys that are there from now on, or not any more."""

    keys: tuple[bytes, ...]
    removed: bool


class Announcements:
    """`mine` tells which files this worker speaks of, `present` which are there."""

    def __init__(self, report_keys: int, mine: str, present: Callable[[FileId], bool]) -> None:
        self._report_keys = report_keys
        self._mine = mine
        self._present = present
        self._changes: deque[tuple[FileId, bool]] = deque()
        self._report: Iterator[FileId] | None = None

    @property
    def pending(self) -> bool:
        return bool(self._changes) or self._report is not None

    @property
    def reporting(self) -> bool:
        return self._report is not None

    def changed(self, file: FileId, *, removed: bool) -> None:
        """O(1). Files of another fingerprint are not this worker's to speak of."""
        if file.folder == self._mine:
            self._changes.append((file, removed))

    def begin_report(self, files: Iterable[FileId]) -> None:
        """Says all of these again; replaces a report that is under way. The files are copied."""
        self._report = iter(list(files))

    def take(self) -> list[Change]:
        """What to say in this step, oldest first; keys that changed alike one after another are one change."""
        taken: list[tuple[list[bytes], bool]] = []
        for _ in range(min(len(self._changes), self._report_keys * CHANGES_PER_REPORT_KEY)):
            file, removed = self._changes.popleft()
            if not taken or taken[-1][1] is not removed:
                taken.append(([], removed))
            taken[-1][0].append(bytes.fromhex(file.name))
        if self._report is not None and not self._changes:
            taken.append((self._take_report(self._report), False))
        return [Change(tuple(keys), removed) for keys, removed in taken if keys]

    def _take_report(self, report: Iterator[FileId]) -> list[bytes]:
        keys: list[bytes] = []
        for file in report:
            if file.folder == self._mine and self._present(file):
                keys.append(bytes.fromhex(file.name))
            if len(keys) == self._report_keys:
                return keys
        self._report = None
        return keys
