# SPDX-License-Identifier: Apache-2.0
"""Who holds what in a process that serves: the keeper's slots over the index that it writes and this process reads.

A slot is only a number of one index, so slots are taken in for the generation that is open and no other: between the
opening of an index and the telling of its slots nobody holds anything here, and never somebody else's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from indexer import _core
from indexer.holders import (
    RankState,
    SlotOwner,
    WorkerHolders,
    WorkerSlots,
    owned_runs,
    slots_since,
)
from indexer.identity import BlockRun, WorkerId
from router.plan.holders import ReadIndex
from router.processes.told import HoldersTold, IndexTold


class SharedIndex(ReadIndex, Protocol):
    """An index that another process writes."""

    @property
    def stamps(self) -> _core.SlotStamps:
        """When each slot last had a batch applied."""
        ...


class OpensIndex(Protocol):
    def __call__(self, told: IndexTold) -> SharedIndex:
        """Open the index that the keeper tells of.

        Raises:
            OSError: it cannot be opened.
        """
        ...


class FollowedHolders:
    """Implements ``router.plan.holders.Holders``. One event loop owns it."""

    def __init__(self, open_index: OpensIndex, told: IndexTold) -> None:
        """Open the first index."""
        self._open_index = open_index
        self._reader = open_index(told)
        self._generation = told.generation
        self._workers: dict[WorkerId, WorkerHolders] = {}
        self._owners: dict[int, SlotOwner] = {}
        self._revision = 0

    @property
    def index(self) -> ReadIndex:
        return self._reader

    @property
    def stamps(self) -> _core.SlotStamps:
        return self._reader.stamps

    @property
    def revision(self) -> int:
        return self._revision

    def workers(self) -> Mapping[WorkerId, WorkerHolders]:
        return self._workers

    def slots(self, worker: WorkerId, revision: int) -> WorkerSlots | None:
        return slots_since(self._workers.get(worker), revision)

    def runs(self, hashes: bytes) -> list[tuple[SlotOwner, BlockRun]]:
        return owned_runs(self.index.match(hashes), self._owners, self._workers)

    def open(self, told: IndexTold) -> bool:
        """Read another index from now on; False where it is the one that is open."""
        if told.generation == self._generation:
            return False
        self._reader = self._open_index(told)
        self._generation = told.generation
        self._workers.clear()
        self._owners.clear()
        self._revision += 1
        return True

    def put(self, worker_id: str, told: HoldersTold | None) -> None:
        """The slots of a worker; None: it has none any more."""
        worker = WorkerId(worker_id)
        if told is not None and told.generation != self._generation:
            return
        self._forget(worker)
        self._revision += 1
        if told is not None:
            holders = _holders(worker, told, self._revision)
            self._workers[worker] = holders
            self._owners[holders.store_slot] = SlotOwner(worker, 0, is_store=True)
            for dp_rank, state in enumerate(holders.ranks):
                if state.applied_at_s is not None:
                    self.stamps.set(state.slot, state.applied_at_s)
                self._owners[state.slot] = SlotOwner(worker, dp_rank, is_store=False)

    def stamp(self, worker_id: str, applied_at_s: Sequence[float | None]) -> None:
        """When each rank of a worker last had a batch applied."""
        holders = self._workers.get(WorkerId(worker_id))
        for state, at_s in zip(holders.ranks if holders is not None else (), applied_at_s, strict=False):
            if at_s is not None and at_s != state.applied_at_s:
                state.applied_at_s = at_s
                self.stamps.set(state.slot, at_s)

    def _forget(self, worker: WorkerId) -> None:
        holders = self._workers.pop(worker, None)
        for slot in [holders.store_slot, *(one.slot for one in holders.ranks)] if holders is not None else ():
            self._owners.pop(slot, None)


def _holders(worker: WorkerId, told: HoldersTold, revision: int) -> WorkerHolders:
    return WorkerHolders(
        worker=worker,
        model=told.model,
        plain=told.plain,
        store_slot=told.store_slot,
        ranks=[
            RankState(
                one.slot,
                seq=one.seq,
                applied_at_s=one.applied_at_s,
                connected=True,
                partial=one.partial,
                suspect=one.suspect,
            )
            for one in told.ranks
        ],
        since_s=told.since_s,
        incarnation=told.incarnation,
        incarnation_reason=told.incarnation_reason,
        revision=revision,
    )
