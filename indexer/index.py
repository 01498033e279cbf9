# SPDX-License-Identifier: Apache-2.0
"""The prefix index: its seam, and how one is made. The semantics are described in ``native/index.hpp``."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from indexer import _core
from indexer.hashing import HashKey
from indexer.reference.index import ReferenceIndex
from indexer.writer_lock import WriterLock

NO_SLOT: int = _core.NO_SLOT
Backend = Literal["native", "reference"]

Run = tuple[int, int, int, int, int]
"""(slot, tier, start block, end block, doubt). Doubt: 0 none; 1 RAM of a rank that cleared its cache; 2 demoting: gone
from HBM, expected in RAM."""


class ApplyCounts(Protocol):
    """What one batch did, in blocks unless named otherwise."""

    @property
    def stored(self) -> int: ...
    @property
    def removed(self) -> int: ...
    @property
    def clears(self) -> int: ...
    @property
    def detached(self) -> int: ...
    @property
    def joined(self) -> int: ...
    @property
    def unidentified(self) -> int: ...
    @property
    def unknown_removals(self) -> int: ...
    @property
    def dropped_waiting(self) -> int: ...
    @property
    def conflicts(self) -> int: ...
    @property
    def malformed_events(self) -> int: ...
    @property
    def unknown_events(self) -> int: ...
    @property
    def unknown_medium_events(self) -> int: ...
    @property
    def sparse_events(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def malformed_batch(self) -> bool: ...


class SlotCounts(Protocol):
    """How many blocks a slot holds, by state."""

    @property
    def hbm(self) -> int: ...
    @property
    def ram(self) -> int: ...
    @property
    def storage(self) -> int: ...
    @property
    def doubtful_ram(self) -> int: ...
    @property
    def unidentified(self) -> int: ...
    @property
    def detached(self) -> int: ...
    @property
    def remembered(self) -> int: ...
    @property
    def demoting(self) -> int: ...
    @property
    def block_size(self) -> int: ...


class PrefixIndex(Protocol):
    """Which block of which prompt lies where. Safe to call from several threads.

    ``now_s`` is the caller's clock, which never goes back; it matters where slots were opened with a grace.
    """

    def open(self, model: str, plain: bool, name: str = "", grace_s: float = 0.0) -> int:
        """A new, empty slot for a holder or a store; readers in other processes see its name. O(1).

        ``grace_s``: a block that leaves HBM stays in answers as demoting for so long, or until it is stored in RAM.
        """

    def retire(self, slot: int) -> None:
        """Forget everything the slot holds, at once. O(1); memory is swept by later calls of ``apply``."""

    def alive(self, slot: int) -> bool: ...

    def suspect(self, slot: int, on: bool) -> None:
        """Tell readers in other processes to leave a slot out of answers, or no longer."""

    def publish(self) -> None:
        """Let readers find this index at its path, and move those of the one before it. Once."""

    def clear(self, slot: int) -> None:
        """As the engine's clear-all: HBM is empty, RAM doubtful. O(blocks of the slot)."""

    def apply(
        self, ranks: Sequence[int], default_rank: int, store: int, payload: bytes, now_s: float = 0.0
    ) -> ApplyCounts:
        """Apply one batch of events; never raises for what the payload holds. O(tokens)."""

    def apply_many(
        self,
        ranks: Sequence[int],
        default_rank: int,
        store: int,
        payloads: Sequence[bytes],
        now_s: float = 0.0,
    ) -> tuple[ApplyCounts, int]:
        """Batches in order: the sum of what they did, and how many were malformed as a whole. O(tokens)."""

    def hash_blocks(
        self, tokens: array[int], block_size: int, model: str, lora: str, first_block_keys: Sequence[str]
    ) -> bytes:
        """Request hashes of the full blocks of a prompt, 8 bytes each. O(tokens)."""

    def match(self, hashes: bytes, now_s: float = 0.0) -> list[Run]:
        """Runs of blocks that live slots hold, up to the first block nobody holds; sorted."""

    @property
    def export_format(self) -> str:
        """Name of what ``export_slot`` gives; another one cannot be imported."""

    def export_slot(self, slot: int) -> bytes:
        """Everything the slot keeps by engine key, what waits for a parent left out. O(blocks)."""

    def import_slot(self, slot: int, records: bytes, block_size: int) -> int:
        """Fill a live, empty slot with what another one exported; returns the number of blocks. O(blocks).

        Raises:
            ValueError: these are no such records, or the slot holds something; nothing is taken then.
        """

    def counts(self, slot: int) -> SlotCounts: ...

    def blocks(self, slot: int) -> list[tuple[int, int]]:
        """(request hash, bit per tier; bit 3: doubtful RAM, bit 4: demoting) of everything held."""

    def sweep(self, steps: int, now_s: float = 0.0) -> bool:
        """Free memory of retired slots and end graces that are over; True when nothing is left to free."""

    def check(self) -> str:
        """The first broken invariant, or an empty string."""

    @property
    def version(self) -> int: ...
    @property
    def distinct_blocks(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds in blocks: of what waits, per slot, and of everything (a block counts once per slot that holds it)."""

    detached_blocks: int = 65_536
    unidentified_blocks: int = 65_536
    remembered_blocks: int = 65_536
    max_blocks: int = 1 << 27


class FileIndex(_core.PrefixIndex):
    """The native index in a file that only it writes."""

    def __init__(
        self, key: bytes, detached: int, unidentified: int, remembered: int, blocks: int, path: Path
    ) -> None:
        self.lock = WriterLock(path)
        super().__init__(key, detached, unidentified, remembered, blocks, str(path))


def open_index(
    key: HashKey, limits: IndexLimits, backend: Backend = "native", path: Path | None = None
) -> PrefixIndex:
    """The index of the named backend. There is no fallback from one to the other.

    With a path the native index lies in a file there, for readers in other processes, once it is published. The file
    reserves its full size without taking it; it belongs on a file system in memory. Nobody else writes one at the same
    path for as long as this index is there.

    Raises:
        WriterLockedError: another index is being written at the path.
        OSError: the file cannot be made.
    """
    if backend == "reference":
        return ReferenceIndex(
            key, limits.detached_blocks, limits.unidentified_blocks, limits.remembered_blocks
        )
    bounds = (
        limits.detached_blocks,
        limits.unidentified_blocks,
        limits.remembered_blocks,
        limits.max_blocks,
    )
    if path is None:
        return _core.PrefixIndex(key.secret, *bounds)
    return FileIndex(key.secret, *bounds, path)


def open_reader(path: Path, key: HashKey) -> _core.IndexReader:
    """The index that another process published at ``path``; see ``native/reader.hpp``.

    Raises:
        OSError: there is no file.
        ValueError: it is no index, or one of another hash key.
    """
    return _core.IndexReader(str(path), key.secret)
