# SPDX-License-Identifier: Apache-2.0
"""From a worker in the table to its section and back.

A section is consistent: it is made on the subscriber's thread between two batches, so its records are what the
batches up to its sequence numbers made of them, no more and no less. A restored stream goes on behind them by the
rules of any reconnect: it first proves that the process is the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from indexer.holders import HolderTable, WorkerHolders
from indexer.identity import WorkerId, WorkerRank
from indexer.snapshot.format import RankSection, StreamSection, WorkerSection
from indexer.stream import EventStream, StreamPosition
from indexer.subscriber import RankEndpoints

log = logging.getLogger(__name__)

Identity = tuple[str, bool, tuple[tuple[int, str], ...]]


def take(
    holders: HolderTable, worker: WorkerId, streams: Sequence[tuple[RankEndpoints, EventStream]]
) -> WorkerSection | None:
    """What a worker holds; None where it is not known well enough. On the subscriber's thread. O(blocks)."""
    known = holders.workers().get(worker)
    if known is None or not streams or any(state.suspect for state in known.ranks):
        return None
    positions = []
    for endpoints, stream in streams:
        position = stream.position()
        if position is None:
            return None  # nothing has come yet, or it may be another process
        positions.append(
            StreamSection(
                endpoints.rank.dp_rank,
                endpoints.events,
                position.seq,
                position.digest,
                position.process_start_time_s,
            )
        )
    index = holders.index
    return WorkerSection(
        model=known.model,
        plain=known.plain,
        streams=positions,
        ranks=[
            RankSection(index.export_slot(state.slot), index.counts(state.slot).block_size, state.partial)
            for state in known.ranks
        ],
        store=index.export_slot(known.store_slot),
    )


class Recalled:
    """Sections that wait for their workers to be registered. The first of an identity counts."""

    def __init__(self) -> None:
        self._sections: dict[Identity, tuple[WorkerSection, str]] = {}
        self.restored: dict[str, int] = {}
        """Workers restored, by where from."""

    def __len__(self) -> int:
        return len(self._sections)

    def add(self, sections: Sequence[WorkerSection], source: str) -> None:
        """Keep these for later."""
        for section in sections:
            self._sections.setdefault(section.identity, (section, source))

    def drop(self) -> None:
        """Whoever has not come by now is not expected any more."""
        self._sections.clear()

    def adopt(
        self, holders: HolderTable, worker: WorkerId, endpoints: Sequence[RankEndpoints]
    ) -> list[RankEndpoints]:
        """Fill a worker that was registered just now, if its section is here; its streams then go on behind it."""
        known = holders.workers().get(worker)
        if known is None:
            return list(endpoints)
        streams = tuple((one.rank.dp_rank, one.events) for one in endpoints)
        found = self._sections.pop((known.model, known.plain, streams), None)
        if found is None or not _fill(holders, known, found[0]):
            return list(endpoints)
        section, source = found
        self.restored[source] = self.restored.get(source, 0) + 1
        by_rank = {one.dp_rank: one for one in section.streams}
        return [_resumed(one, by_rank) for one in endpoints]


def _resumed(endpoints: RankEndpoints, streams: Mapping[int, StreamSection]) -> RankEndpoints:
    one = streams[endpoints.rank.dp_rank]
    return replace(endpoints, resume=StreamPosition(one.seq, one.digest, one.process_start_time_s))


def _fill(holders: HolderTable, known: WorkerHolders, section: WorkerSection) -> bool:
    """Records into the slots; a section that turns out to be none leaves them empty and is logged."""
    started_s = time.perf_counter()
    index = holders.index
    try:
        if len(section.ranks) > len(known.ranks):
            holders.widen(known.worker, len(section.ranks))
        for state, rank in zip(known.ranks, section.ranks, strict=False):
            index.import_slot(state.slot, rank.records, rank.block_size)
        index.import_slot(known.store_slot, section.store, 0)
    except (ValueError, MemoryError) as error:
        why = str(error) or "there is no room for it"
        log.warning("worker %s: its part of a snapshot is not used: %s", known.worker, why)
        holders.reset(known.worker, "a snapshot that could not be used")
        return False
    for dp_rank, rank in enumerate(section.ranks):
        if rank.partial is not None:
            holders.partial(WorkerRank(known.worker, dp_rank), rank.partial)
    for one in section.streams:
        known.ranks[one.dp_rank].seq = one.seq
    log.info("worker %s: restored in %.3f s", known.worker, time.perf_counter() - started_s)
    return True
