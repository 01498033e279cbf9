# SPDX-License-Identifier: Apache-2.0
"""Reads the directory into what is known: all of it once, then only what changed. I/O threads only.

A directory's own modification time tells whether files appeared or disappeared in it. One that changed just now may
change again within the same tick of its clock, so it counts as unchanged only once that time is well past.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from engine_ext.vllm.storage.catalogue import FileId
from engine_ext.vllm.storage.known import KnownFiles
from engine_ext.vllm.storage.room import Room
from engine_ext.vllm.storage.value import Use

_SETTLED_S = 3.0
_FOLDER = re.compile(r"[0-9a-f]{32}")
_SHELF = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"([0-9a-f]{2})+")

Shelf = tuple[str, str]


class Scanner:
    def __init__(self, root: Path, known: KnownFiles, room: Room, orphan_s: float) -> None:
        self._root = root
        self._known = known
        self._room = room
        self._orphan_s = orphan_s
        self._complete = False
        self._settled: dict[Shelf, int] = {}
        """Shelves that need no look, with their modification time in ns."""

    def scan(self) -> None:
        """One pass over all shelves, then the ledger is compared. O(shelves + files of changed shelves).

        Raises:
            LedgerBusy, OSError: the pass is incomplete; the next one starts over where it was.
        """
        with self._room.ledger.held():
            now_s = self._room.ledger.file_system_now_s()
        shelves = self._shelves()
        for shelf in shelves:
            with self._room.ledger.held():
                self._look(shelf, now_s)
        self._end_pass(shelves)
        self._room.correct()

    def learn_all(self) -> None:
        """The same at once, for a caller that holds the ledger; without comparing."""
        now_s = self._room.ledger.file_system_now_s()
        shelves = self._shelves()
        for shelf in shelves:
            self._look(shelf, now_s)
        self._end_pass(shelves)

    def _shelves(self) -> list[Shelf]:
        found = []
        for folder in _names(self._root, _FOLDER):
            found += [(folder, shelf) for shelf in _names(self._root / folder, _SHELF)]
        return found

    def _look(self, shelf: Shelf, now_s: float) -> None:
        """Hold the ledger, so that nothing appears or disappears between listing and noting."""
        path = self._root / shelf[0] / shelf[1]
        try:
            changed_ns = path.stat().st_mtime_ns
            if self._settled.get(shelf) == changed_ns:
                return
            files, unfinished = self._list(path, shelf[0])
        except FileNotFoundError:
            return
        for file in self._known.on_shelf(shelf) - files.keys():
            self._known.forget(file)
        note = self._known.seen if self._complete else self._known.found
        for file, (size_bytes, use) in files.items():
            note(file, size_bytes, use)
        for orphan, written_s in unfinished:
            if now_s - written_s > self._orphan_s:
                with contextlib.suppress(OSError):
                    orphan.unlink()
        if now_s - changed_ns / 1e9 > _SETTLED_S and not unfinished:
            self._settled[shelf] = changed_ns
        else:
            self._settled.pop(shelf, None)

    def _list(
        self, path: Path, folder: str
    ) -> tuple[dict[FileId, tuple[int, Use]], list[tuple[Path, float]]]:
        files: dict[FileId, tuple[int, Use]] = {}
        unfinished = []
        with os.scandir(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                        unfinished.append((Path(entry.path), status.st_ctime))
                    elif _NAME.fullmatch(entry.name) and entry.name.startswith(path.name):
                        files[FileId(folder, entry.name)] = (
                            status.st_size,
                            Use.from_mtime_ns(status.st_mtime_ns),
                        )
        return files, unfinished

    def _end_pass(self, shelves: list[Shelf]) -> None:
        """Whole directories may have been removed. The first pass ends with a full report."""
        for shelf in self._known.shelves() - set(shelves):
            if not (self._root / shelf[0] / shelf[1]).exists():
                for file in self._known.on_shelf(shelf):
                    self._known.forget(file)
        if not self._complete:
            self._complete = True
            self._known.say_gone(self._room.removals.recent(self._known.folder))
            self._known.begin_report()


def _names(path: Path, pattern: re.Pattern[str]) -> list[str]:
    try:
        return sorted(name for name in os.listdir(path) if pattern.fullmatch(name))
    except (FileNotFoundError, NotADirectoryError):
        return []
