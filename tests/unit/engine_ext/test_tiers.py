# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from engine_ext.sim.tiers import RamTier, StorageTier


def ram_with(capacity: int, *keys: bytes) -> RamTier:
    ram = RamTier(capacity)
    ram.prepare(keys)
    ram.complete(keys)
    return ram


def test_a_block_being_written_is_known_but_not_ready() -> None:
    ram = RamTier(2)
    assert ram.prepare([b"a"]) == ([b"a"], [])
    assert ram.known(b"a")
    assert not ram.ready(b"a")
    assert ram.complete([b"a"]) == [b"a"]
    assert ram.ready(b"a")
    assert ram.complete([b"a"]) == []


def test_room_is_made_from_the_least_recently_used_block() -> None:
    ram = ram_with(3, b"a", b"b", b"c")
    ram.touch([b"a"])
    assert ram.prepare([b"d"]) == ([b"d"], [b"b"])


def test_touching_a_chain_makes_its_tail_the_first_to_go() -> None:
    ram = ram_with(3, b"a", b"b", b"c")
    ram.touch([b"a", b"b", b"c"])
    room = ram.prepare([b"d", b"e"])
    assert room is not None
    assert room[1] == [b"c", b"b"]


def test_blocks_named_in_a_store_are_never_evicted_for_it() -> None:
    ram = ram_with(2, b"a", b"b")
    assert ram.prepare([b"a", b"c"]) == ([b"c"], [b"b"])


@pytest.mark.parametrize("blocked", ["pinned", "writing"])
def test_a_store_without_room_changes_nothing(blocked: str) -> None:
    ram = ram_with(1, b"a")
    if blocked == "pinned":
        ram.pin([b"a"])
    else:
        ram = RamTier(1)
        ram.prepare([b"a"])
    assert ram.prepare([b"b"]) is None
    assert ram.known(b"a")
    assert not ram.known(b"b")


def test_a_block_can_be_evicted_again_after_its_last_reader() -> None:
    ram = ram_with(1, b"a")
    ram.pin([b"a"])
    ram.pin([b"a"])
    ram.unpin([b"a"])
    assert ram.prepare([b"b"]) is None
    ram.unpin([b"a"])
    assert ram.prepare([b"b"]) == ([b"b"], [b"a"])


def test_storage_evicts_only_within_a_bound() -> None:
    endless, bounded = StorageTier(), StorageTier(2)
    assert endless.store([b"a", b"b", b"c"]) == ([b"a", b"b", b"c"], [])
    bounded.store([b"a", b"b"])
    bounded.touch([b"a"])
    assert bounded.store([b"c", b"a"]) == ([b"c"], [b"b"])
    assert b"a" in bounded
    assert b"b" not in bounded
