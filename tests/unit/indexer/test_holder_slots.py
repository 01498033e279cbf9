# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import kv_batches as kv
import pytest

from indexer.hashing import HashKey
from indexer.holders import HolderTable, WorkerSlots
from indexer.identity import WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index

W = WorkerId("w")


def table() -> HolderTable:
    holders = HolderTable(open_index(HashKey(kv.KEY_BYTES), IndexLimits()), lambda: 1.0)
    holders.register(W, "m", 2)
    return holders


def slots(holders: HolderTable, revision: int = -1) -> WorkerSlots:
    found = holders.slots(W, revision)
    assert found is not None
    return found


def test_slots_are_told_once_and_again_after_every_change() -> None:
    holders = table()
    before = slots(holders)
    state = holders.workers()[W]
    assert before.ranks == [rank.slot for rank in state.ranks]
    assert (before.suspect, before.store) == ([False, False], state.store_slot)
    assert holders.slots(W, before.revision) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda holders: holders.new_incarnation(W, "restarted"),
        lambda holders: holders.suspect(WorkerRank(W, 1), "reconnected"),
        lambda holders: holders.clear(W),
        lambda holders: holders.register(W, "m", 3),
        lambda holders: holders.unregister(W),
    ],
)
def test_every_change_of_slots_shows_in_the_revision(change: object) -> None:
    holders = table()
    revision, before = holders.revision, slots(holders)
    change(holders)  # type: ignore[operator]
    assert holders.revision > revision
    after = slots(holders, before.revision)
    assert (after.ranks, after.suspect, after.store) != (before.ranks, before.suspect, before.store)


def test_what_changes_no_slot_leaves_the_revision_alone() -> None:
    holders = table()
    revision = holders.revision
    holders.suspect(WorkerRank(W, 0), None)
    holders.partial(WorkerRank(W, 0), "lost batches")
    holders.connection(WorkerRank(W, 0), connected=True)
    holders.apply(WorkerRank(W, 0), 0, kv.batch(kv.stored([1, 2])))
    holders.tick()
    assert holders.revision == revision


def test_worker_that_is_not_registered_has_no_slots() -> None:
    holders = table()
    revision = slots(holders).revision
    holders.unregister(W)
    gone = slots(holders, revision)
    assert (gone.ranks, gone.revision) == ([], 0)
    assert holders.slots(W, gone.revision) is None


def test_further_holders_of_the_same_blocks_cost_nothing_per_block_but_their_own_entries() -> None:
    index = open_index(HashKey(kv.KEY_BYTES), IndexLimits())
    store, blocks = index.open("m", False), 20_000
    stored = kv.batch(kv.stored(list(range(1, blocks + 1))))

    def add_holder() -> int:
        before = index.memory_bytes
        index.apply([index.open("m", False)], 0, store, stored)
        return index.memory_bytes - before

    own_entries = add_holder()
    later = [add_holder() for _ in range(40)]
    assert max(later) <= own_entries
    assert index.check() == ""


def test_match_tells_holders_apart_wherever_they_change_along_the_prompt() -> None:
    index = open_index(HashKey(kv.KEY_BYTES), IndexLimits())
    store = index.open("m", False)
    holders, names = [index.open("m", False) for _ in range(50)], list(range(1, 41))
    for number, slot in enumerate(holders):
        held = names[: 40 - number % 7]
        index.apply([slot], 0, store, kv.batch(kv.stored(held), kv.placeholder(held[number % 5 :])))
        index.apply([slot], 0, store, kv.batch(kv.removed(held[10 : 10 + number % 3])))
    runs = index.match(index.hash_blocks(kv.prompt(names), kv.BLOCK, "m", "", []))
    expected = []
    for number, slot in enumerate(holders):
        end, gone = 40 - number % 7, number % 3
        hbm = [(0, end)] if not gone else [(0, 10), (10 + gone, end)]
        expected += [(slot, 0, start, stop, False) for start, stop in hbm]
        expected.append((slot, 1, number % 5, end, False))
    assert runs == expected
