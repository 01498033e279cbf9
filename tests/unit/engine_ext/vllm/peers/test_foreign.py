# SPDX-License-Identifier: Apache-2.0
"""Pulls from in-tree peers: our deadlines over their protocol, and chunks that they may still write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_ext.transfer.control.peer import BlocksPulled
from engine_ext.vllm.peers.jobs import Finished
from engine_ext.vllm.peers.metrics import LOOKUPS, UNPROVEN
from engine_ext.vllm.peers.reader import Answer
from engine_ext.vllm.plan import Pull

RETRY, HIT, MISS = Answer.RETRY, Answer.HIT, Answer.MISS
Keys = Callable[[int, int], list[bytes]]
MakePull = Callable[..., Pull]


def test_without_permission_nothing_is_asked_and_the_refusal_is_counted(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("s:5710", 0, 2, kind="p2p"))
    assert world.scan(make_keys(0, 2)) == [MISS]
    assert not world.link.finds
    assert world.counted(LOOKUPS) == {("not_allowed",): 1}
    assert world.reports.of("failed") == [("r", "s:5710", "not_allowed", 0.0)]


def test_a_pull_is_a_request_of_its_own_to_the_in_tree_tier(
    mixed: Any, in_tree: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    mixed.begin(make_pull("s:5710", 0, 2, kind="p2p"), make_pull("t:5710", 2, 4, kind="p2p"))
    assert in_tree.opened == [("plan-r.0.r", "s:5710"), ("plan-r.1.r", "t:5710")]
    assert mixed.scan(make_keys(0, 4)) == [RETRY] * 4
    in_tree.known = dict.fromkeys(make_keys(0, 4), True)
    assert mixed.scan(make_keys(0, 4)) == [HIT] * 4
    mixed.load({key: i for i, key in enumerate(make_keys(0, 2))})
    assert in_tree.loads == {-1: {b"k0": 0, b"k1": 1}}
    mixed.reader.foreign_ended(-1, mixed.now_s, complete=True)
    assert mixed.done() == [Finished(7, True, (b"k0", b"k1"), 2000, 0.0)]


def test_one_job_may_mix_an_in_tree_peer_and_one_of_ours(
    mixed: Any, in_tree: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    mixed.begin(make_pull("s:5710", 0, 1, kind="p2p"), make_pull("a:1", 1, 2))
    mixed.scan(make_keys(0, 2))
    in_tree.known = {b"k0": True}
    mixed.found(b"k1")
    assert mixed.scan(make_keys(0, 2)) == [HIT, HIT]
    mixed.load({b"k0": 3, b"k1": 4})
    mixed.hear(BlocksPulled(max(mixed.link.pulls), 1000, 0.1))
    assert mixed.done() == []
    mixed.reader.foreign_ended(-1, mixed.now_s, complete=False)
    assert mixed.done() == [Finished(7, False, (b"k1",), 1000, 0.0)]
    assert list(mixed.quarantine.held) == [3]


def test_after_a_load_the_rest_is_asked_again_because_the_source_has_unpinned_it(
    mixed: Any, in_tree: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    mixed.begin(make_pull("s:5710", 0, 3, kind="p2p"))
    in_tree.known = dict.fromkeys(make_keys(0, 3), True)
    assert mixed.scan(make_keys(0, 3)) == [HIT] * 3
    mixed.load({b"k0": 0})
    assert mixed.scan(make_keys(1, 3)) == [RETRY] * 2
    in_tree.known = {b"k1": True, b"k2": False}
    assert mixed.scan(make_keys(1, 3)) == [HIT, MISS]


def test_chunks_that_the_peer_no_longer_keeps_are_not_asked_for(
    mixed: Any, in_tree: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    mixed.begin(make_pull("s:5710", 0, 2, kind="p2p"))
    in_tree.known = dict.fromkeys(make_keys(0, 2), True)
    mixed.scan(make_keys(0, 2))
    in_tree.known = {b"k0": True}
    mixed.load({b"k0": 5, b"k1": 6})
    assert in_tree.loads == {-1: {b"k0": 5}}
    mixed.reader.foreign_ended(-1, mixed.now_s, complete=True)
    assert mixed.done() == [Finished(7, False, (b"k0",), 1000, 0.0)]


def test_at_the_deadline_the_job_ends_at_once_and_its_chunks_are_held_until_the_transfer_is_over(
    mixed: Any, in_tree: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    mixed.begin(make_pull("s:5710", 0, 2, kind="p2p", within_s=0.5))
    in_tree.known = dict.fromkeys(make_keys(0, 2), True)
    mixed.scan(make_keys(0, 2))
    mixed.load({b"k0": 5, b"k1": 6})
    mixed.now_s += 0.5
    assert mixed.done() == [Finished(7, False, (), 0, 0.5)]
    assert sorted(mixed.quarantine.held) == [5, 6]
    assert in_tree.closed == ["plan-r.0.r"]
    mixed.reader.foreign_ended(-1, mixed.now_s, complete=True)
    assert list(mixed.quarantine.held) == [], "it said that it has written everything"
    assert mixed.done() == []


def test_a_failure_that_may_be_a_timeout_keeps_its_chunks_for_the_lingering_time(
    mixed: Any, in_tree: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    mixed.begin(make_pull("s:5710", 0, 1, kind="p2p"))
    in_tree.known = {b"k0": True}
    mixed.scan(make_keys(0, 1))
    mixed.load({b"k0": 5})
    mixed.reader.finished("r", mixed.now_s)
    assert [job.complete for job in mixed.done()] == [False]
    mixed.reader.foreign_ended(-1, mixed.now_s, complete=False)
    mixed.now_s += 59.9
    mixed.hear()
    assert list(mixed.quarantine.held) == [5]
    mixed.now_s += 0.1
    mixed.hear()
    assert list(mixed.quarantine.held) == []
    assert mixed.counted(UNPROVEN) == {(): 1}


def test_a_peer_that_does_not_answer_is_a_miss_at_the_deadline_and_is_asked_no_more(
    mixed: Any, in_tree: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    mixed.begin(make_pull("s:5710", 0, 2, kind="p2p", within_s=0.5))
    assert mixed.scan(make_keys(0, 2)) == [RETRY] * 2
    mixed.now_s += 0.5
    assert mixed.scan(make_keys(0, 2)) == [MISS]
    assert in_tree.closed == ["plan-r.0.r"]
    in_tree.known = dict.fromkeys(make_keys(0, 2), True)
    assert mixed.scan(make_keys(0, 2)) == [MISS]
