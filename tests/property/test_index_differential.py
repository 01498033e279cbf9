# SPDX-License-Identifier: Apache-2.0
"""A short course of random operations, and what long ones found; ``tests/fuzz/differential.py`` goes on for millions."""

from __future__ import annotations

import kv_batches as kv
import pytest
from index_differ import Differ

from indexer.hashing import HashKey
from indexer.index import IndexLimits, PrefixIndex, open_index


@pytest.mark.parametrize("seed", range(4))
def test_native_index_equals_the_reference_operation_by_operation(seed: int) -> None:
    Differ(seed).run(3_000)


def both(limits: IndexLimits | None = None) -> list[PrefixIndex]:
    limits = limits or IndexLimits()
    return [open_index(HashKey(kv.KEY_BYTES), limits, backend) for backend in ("native", "reference")]


def test_prompt_ends_where_only_a_retired_holder_had_a_block() -> None:
    for index in both():
        gone, stays, store = (index.open("m", False) for _ in range(3))
        index.apply([gone], 0, store, kv.batch(kv.stored([1])))
        index.apply([stays], 0, store, kv.batch(kv.stored([1, 2]), kv.removed([1])))
        query = index.hash_blocks(kv.prompt([1, 2]), kv.BLOCK, "m", "", [])
        assert index.match(query) == [(gone, 0, 0, 1, False), (stays, 0, 1, 2, False)]
        index.retire(gone)
        assert index.match(query) == []


def test_events_that_wait_for_one_parent_join_in_the_order_in_which_they_came() -> None:
    waiting = [kv.stored([6], parent=5, extra_keys=[[salt]]) for salt in ("a", "b", "c")]
    names = []
    for index in both():
        slot, store = index.open("m", False), index.open("m", False)
        index.apply([slot], 0, store, kv.batch(kv.placeholder([6], "STORAGE"), *waiting))
        counts = index.apply([slot], 0, store, kv.batch(kv.stored([5])))
        assert (counts.joined, counts.conflicts) == (3, 2)
        # The store takes the first name, the rank has the last.
        names.append((index.blocks(store), sorted(index.blocks(slot))))
    assert names[0] == names[1]


def test_stored_event_counts_for_all_its_blocks_before_any_is_named() -> None:
    chain = list(range(9))
    counts = []
    for index in both(IndexLimits(remembered_blocks=4)):
        slot, store = index.open("m", True), index.open("m", False)
        index.apply([slot], 0, store, kv.batch(kv.stored(chain, lora_name="a"), kv.removed(chain)))
        found = index.apply([slot], 0, store, kv.batch(kv.stored([*chain, 9], medium="STORAGE")))
        counts.append((found.conflicts, sorted(index.blocks(store))))
    assert counts[0] == counts[1]
