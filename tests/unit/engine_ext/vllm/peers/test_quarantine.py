# SPDX-License-Identifier: Apache-2.0
"""Chunks that may still be written are never handed out; every other chunk comes back exactly once."""

from __future__ import annotations

import random

from engine_ext.vllm.quarantine import Quarantine


def test_a_held_chunk_is_not_free_until_it_is_released() -> None:
    quarantine = Quarantine()
    quarantine.hold([1, 2])
    assert quarantine.free([1, 2, 3]) == [3]
    assert quarantine.parked == 2
    assert quarantine.reclaim() == []
    quarantine.release([1])
    assert quarantine.reclaim() == [1]
    assert quarantine.reclaim() == []
    assert sorted(quarantine.held) == [2]


def test_a_chunk_released_before_it_is_freed_is_freed_the_ordinary_way() -> None:
    quarantine = Quarantine()
    quarantine.hold([1])
    quarantine.release([1])
    assert quarantine.free([1]) == [1]
    assert quarantine.reclaim() == []


def test_a_chunk_held_twice_takes_two_releases() -> None:
    quarantine = Quarantine()
    quarantine.hold([1])
    quarantine.hold([1])
    quarantine.free([1])
    quarantine.release([1])
    assert quarantine.reclaim() == []
    quarantine.release([1])
    assert quarantine.reclaim() == [1]


def test_releasing_what_is_not_held_gives_nothing_away() -> None:
    quarantine = Quarantine()
    quarantine.release([7])
    assert quarantine.reclaim() == []


def test_after_all_is_freed_at_once_only_held_chunks_are_missing_and_come_back_once() -> None:
    quarantine = Quarantine()
    quarantine.hold([1, 2])
    quarantine.free([1])
    quarantine.release([1])
    assert quarantine.all_freed(range(4)) == [0, 1, 3], (
        "the one that waited to be reclaimed is not counted twice"
    )
    assert quarantine.reclaim() == []
    quarantine.release([2])
    assert quarantine.reclaim() == [2]


def test_no_order_of_calls_hands_out_a_held_chunk_or_loses_one() -> None:
    order, quarantine, chunks = random.Random(1), Quarantine(), 12
    free, owned, held = set(range(chunks)), set[int](), set[int]()
    for _ in range(4000):
        match order.randrange(5):
            case 0 if free:
                chunk = free.pop()
                assert chunk not in held
                owned.add(chunk)
            case 1 if owned - held:
                chunk = order.choice(sorted(owned - held))
                quarantine.hold([chunk])
                held.add(chunk)
            case 2 if owned:
                chunk = order.choice(sorted(owned))
                owned.discard(chunk)
                free.update(quarantine.free([chunk]))
            case 3 if held:
                chunk = order.choice(sorted(held))
                quarantine.release([chunk])
                held.discard(chunk)
            case 4:
                free.update(quarantine.reclaim())
        assert set(quarantine.held) == held
    quarantine.release(held)
    free.update(quarantine.reclaim())
    assert free | owned == set(range(chunks))
    assert not free & owned
