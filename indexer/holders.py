# SPDX-License-Identifier: Apache-2.0
"""Who holds what: workers, ranks and incarnations on top of the index's anonymous slots.

Invariants:

* Each rank of a registered worker has exactly one live slot; a new incarnation gets new slots for all ranks.
* A worker's store has a slot of its own, which outlives incarnations.
* A rank that lost batches is *partial*, one that may be another process is *suspect*: named states, kept until
  a new incarnation starts from a whole history.
* ``revision`` of the table and of a worker grow with every change of what a worker's slots are or count for, so
  whoever keeps them elsewhere knows when to look again.

Written by the subscriber's thread (``EventSink``) and by register/unregister; read from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from indexer import _core
from indexer.identity import BlockRun, Tier, WorkerId, WorkerRank
from indexer.index import NO_SLOT, ApplyCounts, PrefixIndex, Run
from indexer.slot_names import SlotName

log = logging.getLogger(__name__)

APPLY_COUNTS = (
    "stored",
    "removed",
    "clears",
    "detached",
    "joined",
    "unidentified",
    "unknown_removals",
    "dropped_waiting",
    "conflicts",
    "malformed_events",
    "unknown_events",
    "unknown_medium_events",
    "sparse_events",
    "evicted",
    "malformed_batches",
)
"""What the index tells of batches; ``malformed_batches`` comes beside the rest."""

TOTALS = (*APPLY_COUNTS, "refused_batches")
"""What is summed up per rank: that, and batches that were lost, or some of them, for want of memory."""

NO_ROOM = "the index has no room left: batches were dropped"
EMPTIED = "the index has no room left: what was known of the rank was dropped"

_SWEEP_STEPS = 16_384  # per tick: below a millisecond of the index's lock


@dataclass(slots=True)
class RankState:
    """One rank of the running incarnation."""

    slot: int
    seq: int | None = None
    """Sequence number of the newest batch applied."""
    applied_at_s: float | None = None
    connected: bool = False
    partial: str | None = None
    suspect: str | None = None
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    """Sums over all incarnations of what batches did, by the names of ``TOTALS``."""
    refused: bool = False
    """There was no room for the latest batches."""


@dataclass(slots=True)
class WorkerHolders:
    """A registered worker."""

    worker: WorkerId
    model: str
    plain: bool
    store_slot: int
    ranks: list[RankState]
    since_s: float
    """When the running incarnation was first seen."""
    incarnation: int = 1
    incarnation_reason: str = "first seen"
    offload_grace_s: float = 0.0
    """How long a block that left HBM may take to appear in RAM; 0: the engine offloads nothing."""
    revision: int = 0


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """Whose slot it is: a rank, or the store that this worker attaches."""

    worker: WorkerId
    dp_rank: int
    is_store: bool


@dataclass(frozen=True, slots=True)
class WorkerSlots:
    """The slots of a worker; empty for one that is not registered."""

    revision: int
    ranks: list[int] = field(default_factory=list)
    suspect: list[bool] = field(default_factory=list)
    """Per rank: left out of answers."""
    store: int = NO_SLOT


class HolderTable:
    """Maps workers to slots and applies their batches. Implements ``indexer.subscriber.EventSink``."""

    def __init__(self, index: PrefixIndex, clock: Callable[[], float]) -> None:
        self.index = index
        self._clock = clock
        self._lock = threading.RLock()
        self._workers: dict[WorkerId, WorkerHolders] = {}
        self._owners: dict[int, SlotOwner] = {}
        self.revision = 0
        self.stamps = _core.SlotStamps()
        """When each slot last had a batch applied, for the native planner."""

    def register(
        self, worker: WorkerId, model: str, ranks: int, *, plain: bool = False, offload_grace_s: float = 0.0
    ) -> None:
        """Start to keep blocks of a worker; registering it again starts a new incarnation.

        ``offload_grace_s``: see ``WorkerHolders``.

        Raises:
            MemoryError: the index has no room for another worker; none of it is registered then.
        """
        with self._lock:
            if worker in self._workers:
                self.unregister(worker)
            store = self._open_store(worker, model, 1)
            holders = WorkerHolders(
                worker, model, plain, store, [], self._clock(), offload_grace_s=offload_grace_s
            )
            self._workers[worker] = holders
            try:
                self._add_ranks(holders, ranks)
            except MemoryError:
                self.unregister(worker)
                raise
            self._revise(holders)

    def widen(self, worker: WorkerId, ranks: int) -> None:
        """A worker turns out to have this many ranks; what the known ones hold stays.

        Raises:
            MemoryError: the index has no room for all of them.
        """
        with self._lock:
            holders = self._workers.get(worker)
            if holders is not None and len(holders.ranks) < ranks:
                self._add_ranks(holders, ranks)
                self._revise(holders)

    def unregister(self, worker: WorkerId) -> None:
        """Forget a worker and everything it held."""
        with self._lock:
            holders = self._workers.pop(worker, None)
            if holders is not None:
                for slot in [holders.store_slot, *(rank.slot for rank in holders.ranks)]:
                    self._retire(slot)
                self._revise(holders)

    def clear(self, worker: WorkerId) -> bool:
        """Forget all blocks of a worker, storage included (an operator's purge); False if there is none."""
        with self._lock:
            holders = self._workers.get(worker)
            if holders is None:
                return False
            self._renew(holders, "cleared by an operator")
            for rank in holders.ranks:
                rank.partial = "cleared by an operator"  # the engine still holds what is forgotten here
            self._empty_store(holders)
            return True

    def reset(self, worker: WorkerId, reason: str) -> None:
        """Empty slots, storage included, for a worker of which nothing is known after all."""
        with self._lock:
            holders = self._workers.get(worker)
            if holders is not None:
                self._renew(holders, reason)
                self._empty_store(holders)

    def clear_device(self, worker: WorkerId) -> None:
        """The engine's cache is known to be empty although no event said so (it sleeps)."""
        with self._lock:
            holders = self._workers.get(worker)
            for rank in holders.ranks if holders is not None else ():
                self.index.clear(rank.slot)

    def workers(self) -> Mapping[WorkerId, WorkerHolders]:
        """The registered workers; read only."""
        return self._workers

    def slots(self, worker: WorkerId, revision: int) -> WorkerSlots | None:
        """The slots of a worker; None where ``revision`` is still that of its newest change (0: not registered)."""
        with self._lock:
            return slots_since(self._workers.get(worker), revision)

    def runs(self, hashes: bytes) -> list[tuple[SlotOwner, BlockRun]]:
        """Who holds which blocks of a prompt, ranks under suspicion left out. See ``PrefixIndex.match``."""
        return owned_runs(self.index.match(hashes, self._clock()), self._owners, self._workers)

    def apply(self, rank: WorkerRank, seq: int, payload: bytes) -> None:
        """One batch; ``seq`` is its sequence number."""
        self.apply_many(rank, seq, [payload])

    def apply_many(self, rank: WorkerRank, last_seq: int, payloads: Sequence[bytes]) -> None:
        """Consecutive batches, of which the last has this sequence number. O(tokens)."""
        holders = self._workers.get(rank.worker)
        if holders is None or rank.dp_rank >= len(holders.ranks):
            return  # a last batch of a subscription that is being closed
        slots = [state.slot for state in holders.ranks]
        now_s = self._clock()
        state = holders.ranks[rank.dp_rank]
        try:
            counts, malformed = self.index.apply_many(
                slots, rank.dp_rank, holders.store_slot, payloads, now_s
            )
        except MemoryError:
            self.refused(rank, last_seq, len(payloads))
            return
        state.refused = False
        _add(state.totals, counts, malformed)
        state.applied_at_s = now_s
        self.stamps.set(state.slot, state.applied_at_s)
        state.seq = last_seq

    def new_incarnation(self, worker: WorkerId, reason: str) -> None:
        with self._lock:
            holders = self._workers.get(worker)
            if holders is not None:
                self._renew(holders, reason)

    def partial(self, rank: WorkerRank, reason: str) -> None:
        state = self._state(rank)
        if state is not None:
            state.partial = reason

    def suspect(self, rank: WorkerRank, reason: str | None) -> None:
        with self._lock:
            state = self._state(rank)
            if state is not None and state.suspect != reason:
                state.suspect = reason
                self.index.suspect(state.slot, reason is not None)
                self._revise(self._workers[rank.worker])

    def connection(self, rank: WorkerRank, connected: bool) -> None:
        state = self._state(rank)
        if state is not None:
            state.connected = connected

    def tick(self) -> None:
        """Free memory of what was retired: without this it would wait for the next events."""
        self.index.sweep(_SWEEP_STEPS, self._clock())

    def refused(self, rank: WorkerRank, last_seq: int, batches: int) -> None:
        """There is no room. How many of the batches were applied before is not known, so none is tried again.

        A batch may just have been too large. If the next ones find no room either, what the rank holds goes: it no
        longer follows its engine, not even in what is removed, and others can use the memory.
        """
        with self._lock:
            holders, state = self._workers.get(rank.worker), self._state(rank)
            if holders is None or state is None:
                return
            state.totals["refused_batches"] += batches
            state.seq = last_seq
            again, state.refused = state.refused, not state.refused
            reason = EMPTIED if again or state.partial == EMPTIED else NO_ROOM
            if state.partial != reason:  # once per state, not per batch
                log.error("worker %s, rank %d: %s", rank.worker, rank.dp_rank, reason)
            state.partial = reason
            if not again:
                return
            self._reopen(holders, rank.dp_rank, state)
            self._revise(holders)
        while not self.index.sweep(_SWEEP_STEPS, self._clock()):
            pass

    def _reopen(self, holders: WorkerHolders, dp_rank: int, state: RankState) -> None:
        """An empty slot for a rank; where not even that fits, it keeps the retired one, which takes nothing."""
        self._retire(state.slot)
        with contextlib.suppress(MemoryError):
            state.slot = self._open(holders, dp_rank)

    def _renew(self, holders: WorkerHolders, reason: str) -> None:
        holders.incarnation += 1
        holders.since_s = self._clock()
        holders.incarnation_reason = reason
        for dp_rank, state in enumerate(holders.ranks):
            fresh = RankState(state.slot, connected=state.connected, totals=state.totals)
            self._reopen(holders, dp_rank, fresh)
            if not self.index.alive(fresh.slot):
                fresh.partial = EMPTIED
            holders.ranks[dp_rank] = fresh
        self._revise(holders)

    def _add_ranks(self, holders: WorkerHolders, ranks: int) -> None:
        for dp_rank in range(len(holders.ranks), ranks):
            holders.ranks.append(RankState(self._open(holders, dp_rank)))

    def _empty_store(self, holders: WorkerHolders) -> None:
        self._retire(holders.store_slot)
        with contextlib.suppress(MemoryError):  # it keeps the retired one, as a rank does
            holders.store_slot = self._open_store(holders.worker, holders.model, holders.incarnation)
        self._revise(holders)

    def _revise(self, holders: WorkerHolders) -> None:
        """To be called last: who reads the new number reads the new state."""
        self.revision += 1
        holders.revision = self.revision

    def _open(self, holders: WorkerHolders, dp_rank: int) -> int:
        name = SlotName(holders.worker, dp_rank, holders.incarnation)
        slot = self.index.open(holders.model, holders.plain, name.encode(), holders.offload_grace_s)
        self._owners[slot] = SlotOwner(holders.worker, dp_rank, is_store=False)
        return slot

    def _open_store(self, worker: WorkerId, model: str, incarnation: int) -> int:
        name = SlotName(worker, 0, incarnation, is_store=True)
        slot = self.index.open(model, False, name.encode())
        self._owners[slot] = SlotOwner(worker, 0, is_store=True)
        return slot

    def _retire(self, slot: int) -> None:
        self.index.retire(slot)
        self._owners.pop(slot, None)

    def _state(self, rank: WorkerRank) -> RankState | None:
        holders = self._workers.get(rank.worker)
        if holders is None or rank.dp_rank >= len(holders.ranks):
            return None
        return holders.ranks[rank.dp_rank]


def slots_since(holders: WorkerHolders | None, revision: int) -> WorkerSlots | None:
    """The slots of a worker; None where ``revision`` is still that of its newest change (0: not registered)."""
    if holders is None:
        return None if revision == 0 else WorkerSlots(0)
    if holders.revision == revision:
        return None
    return WorkerSlots(
        holders.revision,
        [state.slot for state in holders.ranks],
        [state.suspect is not None for state in holders.ranks],
        holders.store_slot,
    )


def owned_runs(
    matched: Iterable[Run],
    owners: Mapping[int, SlotOwner],
    workers: Mapping[WorkerId, WorkerHolders],
) -> list[tuple[SlotOwner, BlockRun]]:
    """Runs with whose slot each is; those of nobody, and of ranks under suspicion, are left out."""
    found = []
    for slot, tier, start, end, doubt in matched:
        owner = owners.get(slot)
        holders = None if owner is None else workers.get(owner.worker)
        if owner is None or holders is None:
            continue
        if owner.is_store or holders.ranks[owner.dp_rank].suspect is None:
            found.append((owner, BlockRun(slot, Tier(tier), start, end, doubt > 0, doubt == 2)))
    return found


def _add(totals: dict[str, int], counts: ApplyCounts, malformed_batches: int) -> None:
    totals["malformed_batches"] += malformed_batches
    for name in APPLY_COUNTS[:-1]:
        totals[name] += getattr(counts, name)
