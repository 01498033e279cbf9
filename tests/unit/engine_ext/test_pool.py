# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from engine_ext.sim.pool import HbmPool


def filled(pool: HbmPool, *hashes: bytes) -> list[int]:
    blocks, _ = pool.take(len(hashes))
    for block, engine_hash in zip(blocks, hashes, strict=True):
        pool.cache(block, engine_hash)
    return blocks


def test_one_block_is_never_usable() -> None:
    pool = HbmPool(5)
    assert pool.usable_blocks == pool.free_blocks == 4
    with pytest.raises(ValueError, match="cannot take 5"):
        pool.take(5)


def test_a_free_block_keeps_its_contents_until_it_is_handed_out_again() -> None:
    pool = HbmPool(4)
    pool.release(reversed(filled(pool, b"a", b"b", b"c")))
    assert len(pool.match([b"a", b"b", b"c"], 3)) == 3
    _, evicted = pool.take(2)
    assert evicted == [b"c", b"b"]  # the tail of the chain goes first
    assert len(pool.match([b"a", b"b", b"c"], 3)) == 1


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = HbmPool(5)
    first = filled(pool, b"a", b"b")
    second = filled(pool, b"x", b"y")
    pool.release(reversed(first))
    pool.release(reversed(second))
    pool.touch(pool.match([b"a", b"b"], 2))
    pool.release(reversed(first))
    assert pool.take(4)[1] == [b"y", b"x", b"b", b"a"]


def test_a_block_that_never_became_full_is_reused_before_any_cached_one() -> None:
    pool = HbmPool(4)
    blocks, _ = pool.take(3)
    pool.cache(blocks[0], b"a")
    pool.cache(blocks[1], b"b")
    pool.release(reversed(blocks))
    assert pool.take(1) == ([blocks[2]], [])


def test_two_copies_of_one_hash_are_evicted_one_by_one() -> None:
    pool = HbmPool(3)
    pool.release(filled(pool, b"a", b"a"))
    assert pool.hashes() == {b"a": 2}
    assert pool.take(1)[1] == [b"a"]
    assert pool.hashes() == {b"a": 1}
    assert pool.take(1)[1] == [b"a"]
    assert not pool.holds(b"a")


def test_a_block_in_use_by_two_requests_is_free_after_the_second_release() -> None:
    pool = HbmPool(3)
    blocks = filled(pool, b"a")
    pool.touch(blocks)
    pool.release(blocks)
    assert pool.free_blocks == 1
    assert pool.usage == 0.5
    pool.release(blocks)
    assert pool.free_blocks == 2


def test_clear_is_refused_while_a_block_is_in_use() -> None:
    pool = HbmPool(3)
    blocks = filled(pool, b"a")
    assert not pool.clear()
    assert pool.holds(b"a")
    pool.release(blocks)
    assert pool.clear()
    assert not pool.holds(b"a")
    assert pool.take(2)[1] == []
