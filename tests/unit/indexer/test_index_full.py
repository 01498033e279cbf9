# SPDX-License-Identifier: Apache-2.0
"""An index without room: what is lost is counted and named, and everything that follows is taken as it comes."""

from __future__ import annotations

import logging
from pathlib import Path

import kv_batches as kv
import pytest

from indexer.approximate import ApproximateBlocks, SentPrompt
from indexer.hashing import HashKey
from indexer.holders import EMPTIED, NO_ROOM, HolderTable
from indexer.identity import WorkerId, WorkerRank
from indexer.index import IndexLimits, PrefixIndex, open_index
from indexer.service.registry import Registry
from indexer.service.requests import Register, RequestError
from indexer.service.sink import WideningHolders
from indexer.subscriber import RankEndpoints

LIMITS = IndexLimits(max_blocks=100)
TOO_LARGE = kv.batch(["Padding", bytes(2_000_000)])
"""A file for so few blocks has no room for all that a batch of this size might store."""
WORKER = WorkerId("w")
RANK = WorkerRank(WORKER, 0)


@pytest.fixture
def index(tmp_path: Path) -> PrefixIndex:
    return open_index(HashKey(kv.KEY_BYTES), LIMITS, path=tmp_path / "index")


@pytest.fixture
def table(index: PrefixIndex) -> HolderTable:
    holders = HolderTable(index, lambda: 0.0)
    holders.register(WORKER, "m", 1)
    holders.register(WorkerId("other"), "m", 1)
    return holders


def held(table: HolderTable, worker: str = WORKER) -> int:
    return table.index.counts(table.workers()[WorkerId(worker)].ranks[0].slot).hbm


def test_a_batch_without_room_is_counted_and_makes_the_holder_partial(table: HolderTable) -> None:
    table.apply(RANK, 0, kv.batch(kv.stored([1, 2])))
    table.apply_many(RANK, 2, [kv.batch(kv.stored([3], parent=2)), TOO_LARGE])
    state = table.workers()[WORKER].ranks[0]
    assert (state.partial, state.totals["refused_batches"], state.seq) == (NO_ROOM, 2, 2)
    table.apply(RANK, 3, kv.batch(kv.removed([1])))
    assert held(table) == 2  # the batch before the one without room counts, once
    table.apply(RANK, 4, kv.batch(kv.removed([2, 3])))
    assert held(table) == 0
    assert state.partial == NO_ROOM
    assert table.index.check() == ""


def test_a_rank_that_finds_no_room_again_is_emptied_and_others_stay(table: HolderTable) -> None:
    table.apply(RANK, 0, kv.batch(kv.stored([1, 2])))
    table.apply(WorkerRank(WorkerId("other")), 0, kv.batch(kv.stored([1, 2, 3])))
    revision = table.revision
    for seq in (1, 2):
        table.apply(RANK, seq, TOO_LARGE)
    state = table.workers()[WORKER].ranks[0]
    assert (state.partial, state.totals["refused_batches"], held(table)) == (EMPTIED, 2, 0)
    assert table.revision > revision  # whoever keeps slots elsewhere looks again
    assert held(table, "other") == 3
    table.apply(RANK, 3, kv.batch(kv.stored([7, 8])))
    assert (held(table), state.seq) == (2, 3)
    table.apply(RANK, 4, TOO_LARGE)
    assert held(table) == 2  # only what comes in a row empties it
    assert table.index.check() == ""


def test_a_new_incarnation_is_whole_again(table: HolderTable) -> None:
    table.apply(RANK, 0, TOO_LARGE)
    table.new_incarnation(WORKER, "restarted")
    assert table.workers()[WORKER].ranks[0].partial is None


def test_each_state_is_logged_once_however_many_batches_find_no_room(
    table: HolderTable, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for seq in range(9):
            table.apply(RANK, seq, TOO_LARGE)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"worker w, rank 0: {reason}" for reason in (NO_ROOM, EMPTIED)]
    assert table.workers()[WORKER].ranks[0].totals["refused_batches"] == 9


class FullIndex:
    """The native index once there is room for nothing at all."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def __getattr__(self, name: str) -> object:
        return getattr(self._index, name)

    def open(self, *_: object, **__: object) -> int:
        raise MemoryError

    def apply(self, *_: object, **__: object) -> None:
        raise MemoryError

    apply_many = import_slot = apply


def test_a_worker_that_there_is_no_room_for_is_not_registered_at_all(index: PrefixIndex) -> None:
    table = HolderTable(FullIndex(index), lambda: 0.0)  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        table.register(WORKER, "m", 2)
    assert table.workers() == {}
    assert table.slots(WORKER, 0) is None


def test_a_restart_without_room_for_new_slots_leaves_nothing_of_the_old_process(table: HolderTable) -> None:
    table.apply(RANK, 0, kv.batch(kv.stored([1, 2])))
    table.index = FullIndex(table.index)  # type: ignore[assignment]
    table.new_incarnation(WORKER, "restarted")
    state = table.workers()[WORKER].ranks[0]
    assert (state.partial, held(table), table.workers()[WORKER].incarnation) == (EMPTIED, 0, 2)
    assert not table.index.alive(state.slot)


def test_what_the_index_has_no_room_for_is_not_guessed(index: PrefixIndex) -> None:
    slot = index.open("m", False)
    guess = ApproximateBlocks(FullIndex(index), slot, 100, 60.0)  # type: ignore[arg-type]
    guess.sent(SentPrompt(kv.prompt([1, 2]), kv.BLOCK, "m"), 0.0)
    assert len(guess) == 0


def test_the_service_refuses_a_registration_without_room_and_takes_it_later(index: PrefixIndex) -> None:
    table = HolderTable(FullIndex(index), lambda: 0.0)  # type: ignore[arg-type]
    added: list[RankEndpoints] = []
    registry = Registry(table, Subscriptions(added))
    asked = Register(instance_id=1, endpoint="tcp://127.0.0.1:1", model_name="m", block_size=kv.BLOCK)
    with pytest.raises(RequestError, match="no room") as refused:
        registry.register(asked)
    assert (refused.value.status, list(registry.groups()), added) == (503, [], [])
    table.index = index
    registry.register(asked)
    assert len(added) == 1


def test_a_batch_for_a_rank_that_there_is_no_room_for_goes_to_no_other(index: PrefixIndex) -> None:
    table = WideningHolders(index, lambda: 0.0)
    table.register(WORKER, "m", 1)
    table.index = FullIndex(index)  # type: ignore[assignment]
    table.apply(RANK, 0, kv.batch(kv.stored([1, 2]), rank=3))
    state = table.workers()[WORKER].ranks[0]
    assert (len(table.workers()[WORKER].ranks), state.totals["refused_batches"]) == (1, 1)
    assert (state.partial, held(table)) == (NO_ROOM, 0)


class Subscriptions:
    """What would be followed."""

    def __init__(self, added: list[RankEndpoints]) -> None:
        self._added = added

    def add(self, endpoints: list[RankEndpoints]) -> None:
        self._added += endpoints

    def remove(self, worker: WorkerId) -> None: ...
