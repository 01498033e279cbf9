# SPDX-License-Identifier: Apache-2.0
"""Slots of a shared index in a process that reads it: of the index that is open, and of no other."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from indexer import _core
from indexer.identity import WorkerId
from router.processes.followed_holders import FollowedHolders
from router.processes.told import HoldersTold, IndexTold, RankTold


@dataclass
class Index:
    """In place of one that another process writes."""

    path: str
    stamps: _core.SlotStamps = field(default_factory=_core.SlotStamps)
    version: int = 1

    def hash_blocks(self, tokens: array[int], block_size: int, model: str, lora: str, keys: object) -> bytes:
        raise NotImplementedError

    def match(self, hashes: bytes) -> list[tuple[int, int, int, int, bool]]:
        return [(1, 0, 0, 4, False), (2, 0, 0, 2, False), (9, 2, 0, 8, False)]


def held(generation: int, *slots: int, suspect: str | None = None) -> HoldersTold:
    ranks = [RankTold(slot, 1, 5.0, None, suspect) for slot in slots]
    return HoldersTold(generation, "m", False, 9, 0.0, 1, "first seen", ranks)


def holders() -> FollowedHolders:
    return FollowedHolders(lambda told: Index(told.path), IndexTold(1, "one"))


def owners(one: FollowedHolders) -> list[tuple[str, int, bool]]:
    return [(owner.worker, owner.dp_rank, owner.is_store) for owner, _ in one.runs(b"")]


def test_slots_are_those_that_the_keeper_tells() -> None:
    one = holders()
    assert owners(one) == []
    one.put("a", held(1, 1, 2))
    assert owners(one) == [("a", 0, False), ("a", 1, False), ("a", 0, True)]
    slots = one.slots(WorkerId("a"), -1)
    assert slots is not None
    assert (slots.ranks, slots.store, slots.suspect) == ([1, 2], 9, [False, False])
    assert one.slots(WorkerId("a"), slots.revision) is None
    one.put("a", held(1, 2))
    assert owners(one) == [("a", 0, False), ("a", 0, True)]
    one.put("a", None)
    assert owners(one) == []
    assert one.slots(WorkerId("a"), 1) is not None


def test_ranks_under_suspicion_are_left_out() -> None:
    one = holders()
    one.put("a", held(1, 1, 2, suspect="restarted?"))
    assert owners(one) == [("a", 0, True)]


def test_after_another_index_is_opened_nobody_holds_anything_until_its_slots_are_told() -> None:
    one = holders()
    one.put("a", held(1, 1, 2))
    revision = one.revision
    assert not one.open(IndexTold(1, "one"))
    assert one.open(IndexTold(2, "two"))
    assert one.revision > revision
    assert owners(one) == []
    one.put("b", held(1, 1))  # a late word of the index before
    assert owners(one) == []
    one.put("b", held(2, 1))
    assert owners(one) == [("b", 0, False), ("b", 0, True)]


def test_times_of_batches_are_noted_for_the_planner() -> None:
    one = holders()
    one.put("a", held(1, 1))
    one.stamp("a", [7.5])
    one.stamp("nobody", [1.0])
    assert one.workers()[WorkerId("a")].ranks[0].applied_at_s == 7.5
