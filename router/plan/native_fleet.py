# SPDX-License-Identifier: Apache-2.0
"""The fleet as the native planner sees it: a table that is written when something changes, read by every decision.

What changes seldom is looked for cheaply before each decision: other lists of workers (by identity, see
``router.fleet.snapshot``), other slots (``HolderTable.revision``), other constants (``CostChanges``), other trust.
What changes with every request (the load board, the index) the core reads itself.

Cost: a decision about known lists makes no Python object per candidate; a new list costs O(workers).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from indexer import _core
from indexer.identity import WorkerId
from router.costs.model import WatchedCosts
from router.fleet.fingerprint import fingerprint
from router.fleet.snapshot import Excluding, Snapshot
from router.fleet.worker import (
    Health,
    WorkerSpec,
    WorkerStatus,
    address_text,
    rank_address,
    reads_p2p,
)
from router.plan import candidate
from router.plan.candidate import Question
from router.plan.holders import Holders, ReadIndex
from router.plan.native import PlannerSettings
from router.plan.native_board import NativeLoadBoard
from router.plan.native_costs import CostsCopy
from router.plan.native_question import FleetAsked, FleetCandidates
from router.plan.shared_reader import SharedReader
from router.plan.speculation import SPECULATIVE_S, lasting_s

KEPT = 16
"""Plans that a decision makes, the best first."""
_SERVING_PEERS = (Health.HEALTHY, Health.DRAINING)
_MOST_SELECTIONS = 64

_NOBODY: Collection[str] = frozenset()
_BELIEVED = (1.0, 1.0, 1.0)


class TrustRecords(Protocol):
    """Where trust in workers' maps is kept (``router.decisions.trust``)."""

    @property
    def formula(self) -> tuple[float, float, float]:
        """(tokens of good faith, seconds of memory, least trust), constants of the formula."""
        ...

    def watch(self) -> set[str]:
        """Workers whose record has changed; the table takes out those it has read."""
        ...

    def record(self, worker: str) -> tuple[float, float, float]:
        """(tokens promised, kept, at which time)."""
        ...


@dataclass(slots=True)
class _Entry:
    """A worker in the table."""

    number: int
    first_row: int
    spec: WorkerSpec
    block_size_tokens: int | None
    kv_capacity_tokens: int
    revision: int = -1
    """Of its holders, as the core knows them; -1: of nothing."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Lists of workers, prepared."""

    selection: _core.Selection
    types: _core.PlanTypes
    names: _core.Names
    lists: tuple[Sequence[WorkerStatus], Sequence[WorkerStatus]]
    """Kept, so that no other list can have their identity."""


class FleetSurvey:
    """The fleet at the moment of a decision; ``busy`` of its ``ranks`` have prefills under way."""

    def __init__(
        self, fleet: NativeFleet, chosen: _Chosen, without: list[int], asked: FleetAsked, now_s: float
    ):
        rank = -1 if asked.pinned_rank is None else asked.pinned_rank
        self.busy, self.ranks = fleet.core.survey(chosen.selection, rank, without, now_s)
        # Without a reference to this survey: they would be a cycle, and leave garbage behind each request.
        decide = partial(_decide, fleet, chosen, without, asked, rank, now_s)
        self.candidates = FleetCandidates(decide, chosen.types, chosen.names)


def _decide(
    fleet: NativeFleet,
    chosen: _Chosen,
    without: list[int],
    asked: FleetAsked,
    rank: int,
    now_s: float,
    question: Question,
    seed: int,
) -> _core.Outcome:
    return fleet.core.decide(
        fleet.index,
        chosen.selection,
        rank,
        without,
        asked.token_ids,
        asked.estimated_tokens,
        asked.model,
        asked.lora,
        asked.first_block_keys,
        asked.may_pull,
        question.output_tokens,
        question.slo_tpot_s,
        question.pressure,
        now_s,
        seed,
        KEPT,
    )


class NativeFleet:
    """The table. To be used by the thread that decides."""

    def __init__(
        self,
        holders: Holders,
        board: NativeLoadBoard,
        costs: WatchedCosts,
        settings: PlannerSettings,
        *,
        use_peers: bool,
        trust: TrustRecords | None = None,
        allow_unfingerprinted_peers: bool = False,
        speculative_s: float = SPECULATIVE_S,
    ) -> None:
        """``trust`` None: every map is believed. ``allow_unfingerprinted_peers``, ``speculative_s`` as in ``Decider``.

        Raises:
            TypeError: the index is not that of the native core.
        """
        self.index = _native(holders.index)
        self.core = _core.FleetPlanner(
            self.index,
            board.core,
            board.residents,
            holders.stamps,
            settings.gpu_seconds_weight,
            settings.pull_deadline_s,
            max(settings.min_pull_tokens, 1),
            lasting_s(speculative_s),
            *(_BELIEVED if trust is None else trust.formula),
        )
        self._types = _core.PlanTypes(candidate)
        self._holders = holders
        self._board = board
        self._constants = CostsCopy(self.core, costs)
        self._use_peers = use_peers
        self._allow_unfingerprinted = allow_unfingerprinted_peers
        self._trust = trust
        self._doubted = set() if trust is None else trust.watch()
        self._entries: dict[str, _Entry] = {}
        self._workers: list[str] = []
        self._addresses: list[tuple[str, int, str]] = []
        """Host and port of the P2P tier, and ``host:port`` of our extension."""
        self._revision = -1
        self._selections: dict[tuple[int, int, str], _Chosen] = {}

    def ask(
        self,
        asked: FleetAsked,
        candidates: Sequence[WorkerStatus],
        peers: Sequence[WorkerStatus],
        now_s: float,
    ) -> FleetSurvey:
        """Bring the table up to date and look at the load of ``candidates``; ``peers`` may serve as sources.

        O(workers) for lists that it was not given before, else O(candidates) without an object for any of them.
        """
        names = _NOBODY
        if isinstance(candidates, Excluding):
            names, candidates = candidates.names, candidates.snapshot
        chosen = self._choose(candidates, peers, asked.model)
        self._constants.take()
        if self._doubted:
            self._take_trust()
        if self._holders.revision != self._revision:
            self._take_slots()
        without = [self._entries[name].number for name in names if name in self._entries]
        return FleetSurvey(self, chosen, without, asked, now_s)

    def _choose(
        self, candidates: Sequence[WorkerStatus], peers: Sequence[WorkerStatus], model: str
    ) -> _Chosen:
        lasting = isinstance(candidates, Snapshot) and isinstance(peers, Snapshot)
        key = (id(candidates), id(peers), model)
        chosen = self._selections.get(key) if lasting else None
        if chosen is None:
            self._enter(candidates, peers)
            chosen = self._select(candidates, peers, model)
            if lasting:
                if len(self._selections) >= _MOST_SELECTIONS:
                    self._selections.clear()
                self._selections[key] = chosen
        return chosen

    def _select(
        self, candidates: Sequence[WorkerStatus], peers: Sequence[WorkerStatus], model: str
    ) -> _Chosen:
        fingerprints: dict[str, int] = {}

        def members(statuses: Sequence[WorkerStatus]) -> list[tuple[int, int]]:
            found = []
            for status in statuses:
                first = self._entries[status.spec.id].first_row
                text = fingerprint(status, model)
                number = fingerprints.setdefault(text, len(fingerprints))
                found += [(first + rank, number) for rank in range(status.spec.ranks)]
            return found

        # A source that does not answer stalls the engine for its handshake time-out.
        serving = [
            status
            for status in (peers if self._use_peers else ())
            if status.spec.serves_peers and status.answering and status.health in _SERVING_PEERS
        ]
        selection = _core.Selection(members(candidates), members(serving))
        names = _core.Names(self._workers, self._addresses, list(fingerprints))
        return _Chosen(selection, self._types, names, (candidates, peers))

    def _enter(self, candidates: Sequence[WorkerStatus], peers: Sequence[WorkerStatus]) -> None:
        """Rows for these workers; those of others go."""
        statuses = {status.spec.id: status for group in (peers, candidates) for status in group}
        changed = [status for status in statuses.values() if not self._is_current(status)]
        gone = [name for name in self._entries if name not in statuses]
        if not changed and not gone:
            return
        # Outcomes that are still looked at keep the names as they were.
        self._workers, self._addresses = [*self._workers], [*self._addresses]
        self._selections.clear()
        for name in gone:
            self._leave(name)
        for status in changed:
            self._write(status)

    def _is_current(self, status: WorkerStatus) -> bool:
        entry = self._entries.get(status.spec.id)
        return (
            entry is not None
            and entry.spec is status.spec
            and entry.block_size_tokens == status.block_size_tokens
            and entry.kv_capacity_tokens == status.kv_capacity_tokens
        )

    def _write(self, status: WorkerStatus) -> None:
        spec = status.spec
        old = self._entries.get(spec.id)
        if old is None:
            number = self._board.hold(spec.id)
        else:
            number = old.number
            self.core.remove_rows(old.first_row)
        first = self.core.add_rows(
            number,
            [self._board.row(spec.id, rank) for rank in range(spec.ranks)],
            status.block_size_tokens or 0,
            spec.chunk_blocks,
            self._use_peers and reads_p2p(spec, self._allow_unfingerprinted),
            spec.extension is not None,
            spec.p2p is not None,
            status.kv_capacity_tokens,
        )
        missing = first + spec.ranks - len(self._workers)
        self._workers += [""] * missing
        self._addresses += [("", 0, "")] * missing
        for rank in range(spec.ranks):
            self._workers[first + rank] = spec.id
            extension = address_text(*rank_address(spec.extension, rank))
            self._addresses[first + rank] = (*rank_address(spec.p2p, rank), extension)
        self._entries[spec.id] = _Entry(
            number, first, spec, status.block_size_tokens, status.kv_capacity_tokens
        )
        self._revision = -1
        if old is None:
            self._constants.add(spec.id, number)
            self._set_trust(spec.id)

    def _leave(self, name: str) -> None:
        entry = self._entries.pop(name)
        self.core.remove_rows(entry.first_row)
        self.core.forget(entry.number)
        self._constants.remove(name)
        self._board.drop(name)

    def _take_slots(self) -> None:
        revision = self._holders.revision
        for name, entry in self._entries.items():
            slots = self._holders.slots(WorkerId(name), entry.revision)
            if slots is None:
                continue
            entry.revision = slots.revision
            if slots.ranks:
                self.core.bind_slots(entry.first_row, slots.ranks, slots.suspect, slots.store)
            else:
                self.core.unbind_slots(entry.number)
        self._revision = revision

    def _take_trust(self) -> None:
        names = [*self._doubted]
        self._doubted.clear()
        for name in names:
            if name in self._entries:
                self._set_trust(name)

    def _set_trust(self, name: str) -> None:
        if self._trust is not None:
            self.core.set_trust(self._entries[name].number, *self._trust.record(name))


def _native(index: ReadIndex) -> _core.PrefixIndex | _core.IndexReader:
    if isinstance(index, SharedReader):
        return index.core
    if not isinstance(index, _core.PrefixIndex):
        raise TypeError("the native planner reads the native index")
    return index
