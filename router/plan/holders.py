# SPDX-License-Identifier: Apache-2.0
"""Who holds which blocks, as decisions read it: kept in this process, or by another one that writes a shared index."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

from indexer import _core
from indexer.holders import SlotOwner, WorkerHolders, WorkerSlots
from indexer.identity import BlockRun, WorkerId
from indexer.index import Run


class ReadIndex(Protocol):
    """The part of ``indexer.index.PrefixIndex`` that only reads."""

    def hash_blocks(
        self, tokens: array[int], block_size: int, model: str, lora: str, first_block_keys: Sequence[str]
    ) -> bytes: ...

    def match(self, hashes: bytes) -> list[Run]: ...

    @property
    def version(self) -> int: ...


class Holders(Protocol):
    """``indexer.holders.HolderTable``, or what a process that only reads has in its place."""

    @property
    def index(self) -> ReadIndex: ...

    @property
    def revision(self) -> int:
        """Another number after every change of what a worker's slots are or count for."""
        ...

    @property
    def stamps(self) -> _core.SlotStamps: ...

    def slots(self, worker: WorkerId, revision: int) -> WorkerSlots | None:
        """The slots of a worker; None where ``revision`` is still that of its newest change."""
        ...

    def runs(self, hashes: bytes) -> list[tuple[SlotOwner, BlockRun]]:
        """Who holds which blocks of a prompt, ranks under suspicion left out."""
        ...

    def workers(self) -> Mapping[WorkerId, WorkerHolders]: ...
