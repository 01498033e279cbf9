# SPDX-License-Identifier: Apache-2.0
"""Several ranks of one worker, and workers that come and go."""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path

import pytest
from eventually import eventually_now
from kv_batches import KEY_BYTES, batch, stored
from kv_publisher import ScriptedEngine

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index
from indexer.subscriber import RankEndpoints

from .conftest import MODEL, Indexer


def test_a_prefix_belongs_to_the_rank_that_stored_it(indexer: Indexer) -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(ScriptedEngine()) for _ in range(4)]
        indexer.follow("w", *engines)
        # Named in the batch, as engines with data parallelism do; not named: the socket's own.
        engines[2].batch(batch(stored([1, 2, 3]), rank=2))
        engines[3].batch(batch(stored([7, 8])))
        indexer.wait_seq("w", 0, rank=2)
        indexer.wait_seq("w", 0, rank=3)
        assert indexer.matched([1, 2, 3]) == {("w", 2): 3}
        assert indexer.matched([7, 8]) == {("w", 3): 2}
        # A batch that names another rank than its socket's goes where it says.
        engines[0].batch(batch(stored([20]), rank=1))
        # A rank that cannot be: the socket's own.
        engines[0].batch(batch(stored([30]), rank=9))
        indexer.wait_seq("w", 1, rank=0)
        assert indexer.matched([20]) == {("w", 1): 1}
        assert indexer.matched([30]) == {("w", 0): 1}


@pytest.mark.parametrize("replay", [True, False])
def test_a_restart_of_one_rank_is_a_restart_of_all_and_counts_once(indexer: Indexer, replay: bool) -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(ScriptedEngine()) for _ in range(4)]
        indexer.follow("w", *engines, replay=replay)
        for rank, engine in enumerate(engines):
            engine.batch(batch(stored([10 + rank])))
            indexer.wait_seq("w", 0, rank=rank)
        indexer.subscriber.process_started(WorkerId("w"), 100.0)
        addresses = [(engine.events, engine.replay) for engine in engines]
        for engine in engines:
            engine.close()
        engines = [
            stack.enter_context(contextlib.closing(ScriptedEngine(events=events, replay=again)))
            for events, again in addresses
        ]
        for engine in engines:
            engine.wait_for_subscriber()
        indexer.subscriber.process_started(WorkerId("w"), 200.0)
        for rank in range(4):
            eventually_now(
                lambda rank=rank: indexer.matched([10 + rank]) == {},  # type: ignore[misc]
                "blocks of a process that is gone",
            )
            indexer.wait_live("w", rank)
        for rank, engine in enumerate(engines):
            engine.batch(batch(stored([20 + rank])))
        for rank in range(4):
            eventually_now(
                lambda rank=rank: indexer.matched([20 + rank]) == {("w", rank): 1},  # type: ignore[misc]
                "blocks of the new process",
            )
        assert indexer.holders.workers()[WorkerId("w")].incarnation == 2
        assert all(indexer.state("w", rank).partial is None for rank in range(4))
        assert all(indexer.state("w", rank).suspect is None for rank in range(4))


def test_a_worker_that_leaves_takes_its_blocks_and_no_one_else_s(indexer: Indexer) -> None:
    with ScriptedEngine() as first, ScriptedEngine() as second:
        indexer.follow("a", first)
        indexer.follow("b", second)
        for name, engine in (("a", first), ("b", second)):
            engine.batch(batch(stored([1, 2])))
            indexer.wait_seq(name, 0)
        indexer.subscriber.remove(WorkerId("a"))
        indexer.holders.unregister(WorkerId("a"))
        assert indexer.matched([1, 2]) == {("b", 0): 2}
        eventually_now(lambda: len(indexer.streams()) == 1, "a stream of a worker that left")
        first.batch(batch(stored([3], parent=2)))
        second.batch(batch(stored([3], parent=2)))
        indexer.wait_seq("b", 1)
        assert indexer.matched([1, 2, 3]) == {("b", 0): 3}


def test_a_batch_for_a_rank_that_is_no_more_is_dropped(indexer: Indexer) -> None:
    indexer.holders.register(WorkerId("w"), MODEL, 1)
    for rank in (0, 3):
        indexer.holders.apply(WorkerRank(WorkerId("w"), rank), 0, batch(stored([1])))
        indexer.holders.partial(WorkerRank(WorkerId("w"), rank), "lost")
    indexer.holders.apply(WorkerRank(WorkerId("nobody"), 0), 0, batch(stored([1])))
    assert indexer.matched([1]) == {("w", 0): 1}
    indexer.holders.unregister(WorkerId("w"))


def test_an_endpoint_that_cannot_be_connected_to_does_not_stop_the_others(indexer: Indexer) -> None:
    indexer.holders.register(WorkerId("bad"), MODEL, 1)
    rank = WorkerRank(WorkerId("bad"), 0)
    indexer.subscriber.add([RankEndpoints(rank, "nonsense://127.0.0.1:1", None)])
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        engine.batch(batch(stored([1])))
        indexer.wait_seq("w", 0)
    partial = indexer.state("bad").partial
    assert partial is not None
    assert "nonsense" in partial


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.parametrize("backend", ["native"])
def test_memory_of_a_worker_that_left_is_freed_although_no_event_follows(indexer: Indexer) -> None:
    with ScriptedEngine() as engine:
        indexer.follow("w", engine)
        for first in range(1, 60_001, 20_000):
            engine.batch(batch(stored(list(range(first, first + 20_000)))))
        indexer.wait_seq("w", 2)
        indexer.subscriber.remove(WorkerId("w"))
        indexer.holders.unregister(WorkerId("w"))
        assert not indexer.holders.index.sweep(0)
        eventually_now(lambda: indexer.holders.index.sweep(0), "something left to sweep")
        assert indexer.holders.index.distinct_blocks == 0


def test_workers_that_come_and_go_500_times_leave_no_memory_behind() -> None:
    index = open_index(HashKey(KEY_BYTES), IndexLimits())
    holders = HolderTable(index, time.monotonic)
    staying = WorkerId("staying")
    holders.register(staying, MODEL, 1)
    holders.apply(WorkerRank(staying), 0, batch(stored([1, 2, 3])))

    def cycle(number: int, blocks: int = 10_000) -> None:
        worker = WorkerId(f"w{number}")
        holders.register(worker, MODEL, 1)
        holders.apply(WorkerRank(worker), 0, batches[number % len(batches)])
        assert index.counts(holders.workers()[worker].ranks[0].slot).hbm == blocks
        holders.unregister(worker)

    def churn(cycles: int) -> tuple[int, int]:
        """Memory afterwards, as the index counts it and as the process has it."""
        for number in range(cycles):
            cycle(number)
        while not index.sweep(100_000):
            pass
        gc.collect()
        return index.memory_bytes, resident_bytes()

    batches = [batch(stored(list(range(n * 10_000 + 10, n * 10_000 + 10_010)))) for n in range(4)]
    first_bytes, first_resident_bytes = churn(100)
    last_bytes, last_resident_bytes = churn(400)
    assert index.distinct_blocks == 3
    assert last_bytes <= first_bytes * 1.1
    # Blocks that stayed would be hundreds of megabytes more.
    assert last_resident_bytes - first_resident_bytes < 96 * 2**20
    assert len(holders.workers()) == 1
    assert len(holders._owners) == 2
    assert index.check() == ""
