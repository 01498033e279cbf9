# SPDX-License-Identifier: Apache-2.0
"""Looks at what the keeper's brain knows and publishes what has changed. No I/O; the keeper calls it from a timer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from indexer.holders import HolderTable, WorkerHolders
from indexer.identity import WorkerId
from router.costs.calibration import Calibration
from router.decisions.trust import Trust
from router.fleet.fleet import Fleet
from router.map_sources import Maps
from router.processes.told import (
    FLEET_COSTS,
    GENERAL,
    HOLDERS,
    INDEX,
    LINK_COSTS,
    TRUST,
    WORKER,
    WORKER_COSTS,
    GeneralTold,
    HoldersTold,
    IndexTold,
    Key,
    RankMapTold,
    RankTold,
    ScalesTold,
    TrustTold,
    WorkerTold,
)

Change = tuple[Key, object | None]


class Publisher:
    """Who calls ``changes`` tells them to all: each change is returned once."""

    def __init__(
        self,
        fleet: Fleet,
        holders: HolderTable,
        trust: Trust,
        calibration: Calibration | None,
        maps: Maps,
        general: Callable[[], GeneralTold],
        index: IndexTold,
        monotonic_s: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._holders = holders
        self._trust = trust
        self._calibration = calibration
        self._maps = maps
        self._general = general
        self._index = index
        self._monotonic_s = monotonic_s
        self._workers = fleet.watch()
        self._trusted = trust.watch()
        self._moved = calibration.watch() if calibration is not None else None
        self._observed_workers: set[str] = set()
        self._observed_links: set[tuple[str, str]] = set()
        self._are_fleet_costs_due = True
        self._general_told: GeneralTold | None = None
        self._is_index_due = True
        self._revision = -1
        self._revisions: dict[WorkerId, int] = {}

    def observed(self, worker: str, source: str | None = None) -> None:
        """Something was learnt of a worker, and of its link from ``source``."""
        self._are_fleet_costs_due = True
        self._observed_workers.add(worker)
        if source is not None:
            self._observed_links.add((source, worker))

    def changes(self) -> list[Change]:
        """Everything that has changed since the call before. O(changes), O(workers) where slots have changed."""
        return [
            *self._of_general(),
            *self._of_workers(),
            *self._of_costs(),
            *self._of_trust(),
            *self._of_index(),
        ]

    def _of_general(self) -> Iterator[Change]:
        told = self._general()
        if told != self._general_told:
            self._general_told = told
            yield (GENERAL,), told

    def _of_workers(self) -> Iterator[Change]:
        names = [*self._workers]
        self._workers.clear()
        for name in names:
            member = self._fleet.member(name)
            told = None
            if member is not None:
                told = WorkerTold(
                    status=member.status,
                    draining=member.draining,
                    ready=member.ready,
                    answers=member.answers,
                    asked=member.reach is not None,
                    breaker=member.breaker.memory(),
                    ranks=self._ranks(name),
                )
            yield (WORKER, name), told

    def _ranks(self, worker: str) -> list[RankMapTold]:
        holders = self._holders.workers().get(WorkerId(worker))
        return [
            RankMapTold(self._maps.of(worker, dp_rank), state.applied_at_s)
            for dp_rank, state in enumerate([*holders.ranks] if holders is not None else ())
        ]

    def _of_trust(self) -> Iterator[Change]:
        names = [*self._trusted]
        self._trusted.clear()
        for name in names:
            record = self._trust.record(name)
            yield (TRUST, name), TrustTold(*record) if record[0] else None

    def _of_costs(self) -> Iterator[Change]:
        calibration, moved = self._calibration, self._moved
        if calibration is None or moved is None:
            return
        now_s = self._monotonic_s()
        if moved.everything or self._are_fleet_costs_due:
            # Everything is made of the fleet's factors; what is a worker's or link's own has not changed by that.
            moved.everything = self._are_fleet_costs_due = False
            yield (FLEET_COSTS,), ScalesTold([*calibration.dump_fleet(now_s)])
        workers, links = moved.workers | self._observed_workers, moved.links | self._observed_links
        for spent in (moved.workers, moved.links, self._observed_workers, self._observed_links):
            spent.clear()
        for name in workers:
            state = calibration.dump_worker(name, now_s)
            yield (WORKER_COSTS, name), ScalesTold([state]) if state is not None else None
        for pair in links:
            state = calibration.dump_link(*pair, now_s)
            yield (LINK_COSTS, *pair), ScalesTold([state]) if state is not None else None

    def _of_index(self) -> Iterable[Change]:
        if self._is_index_due:
            self._is_index_due = False
            yield (INDEX,), self._index
        if self._holders.revision == self._revision:
            return
        self._revision = self._holders.revision
        holders = dict(self._holders.workers())
        for worker in [name for name in self._revisions if name not in holders]:
            del self._revisions[worker]
            yield (HOLDERS, worker), None
        for worker, one in holders.items():
            if self._revisions.get(worker) != one.revision:
                self._revisions[worker] = one.revision
                yield (HOLDERS, worker), self._held(one)

    def _held(self, holders: WorkerHolders) -> HoldersTold:
        return HoldersTold(
            generation=self._index.generation,
            model=holders.model,
            plain=holders.plain,
            store_slot=holders.store_slot,
            since_s=holders.since_s,
            incarnation=holders.incarnation,
            incarnation_reason=holders.incarnation_reason,
            ranks=[
                RankTold(one.slot, one.seq, one.applied_at_s, one.partial, one.suspect)
                for one in [*holders.ranks]
            ],
        )
