# SPDX-License-Identifier: Apache-2.0
"""The bound of the whole index: what was matched longest ago goes first, and is counted."""

from __future__ import annotations

from collections.abc import Sequence

import kv_batches as kv

from indexer.hashing import HashKey
from indexer.index import IndexLimits, PrefixIndex, open_index

BOUND, CHAIN = 1000, 50


def chain(number: int) -> list[int]:
    return [number * CHAIN + i + 1 for i in range(CHAIN)]


def index_of(bound: int = BOUND) -> PrefixIndex:
    return open_index(HashKey(kv.KEY_BYTES), IndexLimits(max_blocks=bound))


def matched(index: PrefixIndex, names: Sequence[int]) -> int:
    runs = index.match(index.hash_blocks(kv.prompt(names), kv.BLOCK, "m", "", []))
    return max((end for _, _, start, end, _ in runs if start == 0), default=0)


def test_the_index_holds_no_more_than_its_bound_and_counts_what_it_gives_up() -> None:
    index = index_of()
    store, slots = index.open("m", False), [index.open("m", False) for _ in range(3)]
    evicted = 0
    for number in range(200):
        slot = slots[number % 3]
        evicted += index.apply([slot], 0, store, kv.batch(kv.stored(chain(number)))).evicted
        held = sum(index.counts(slot).hbm for slot in slots)
        assert held <= BOUND
        assert held + evicted == (number + 1) * CHAIN
        assert index.distinct_blocks == held
    assert index.check() == ""


def test_what_is_asked_for_stays_and_what_nobody_asks_for_goes() -> None:
    index = index_of()
    store, slot = index.open("m", False), index.open("m", False)
    wanted = [chain(number) for number in range(6)]
    for names in wanted:
        index.apply([slot], 0, store, kv.batch(kv.stored(names)))
    for number in range(6, 300):
        index.apply([slot], 0, store, kv.batch(kv.stored(chain(number))))
        for names in wanted:
            assert matched(index, names) == CHAIN
    assert matched(index, chain(40)) < CHAIN


def test_a_block_that_was_given_up_may_be_removed_and_stored_again() -> None:
    index = index_of(100)
    store, slot = index.open("m", False), index.open("m", False)
    for number in range(6):
        index.apply([slot], 0, store, kv.batch(kv.stored(chain(number))))
    counts = index.apply([slot], 0, store, kv.batch(kv.removed(chain(0))))
    assert counts.removed + counts.unknown_removals == CHAIN
    assert counts.unknown_removals > 0
    index.apply([slot], 0, store, kv.batch(kv.stored(chain(0))))
    assert matched(index, chain(0)) == CHAIN
    assert index.check() == ""


def test_blocks_of_a_retired_holder_make_room() -> None:
    index = index_of(200)
    store, old, new = (index.open("m", False) for _ in range(3))
    for number in range(4):
        index.apply([old], 0, store, kv.batch(kv.stored(chain(number))))
    index.retire(old)
    for number in range(4, 8):
        index.apply([new], 0, store, kv.batch(kv.stored(chain(number))))
    assert index.counts(new).hbm == 200
