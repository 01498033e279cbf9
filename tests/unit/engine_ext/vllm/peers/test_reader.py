# SPDX-License-Identifier: Apache-2.0
"""The consumer: which source is asked for what, what the engine is told meanwhile, and how load jobs end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine_ext.transfer.control.peer import (
    BlocksNotPulled,
    BlocksPulled,
    BlocksReleased,
    Found,
    NotFound,
    NotFoundReason,
)
from engine_ext.transfer.events import FailReason, Proof
from engine_ext.vllm.peers.jobs import Finished
from engine_ext.vllm.peers.metrics import LOOKUPS, PULL_BYTES, PULLS
from engine_ext.vllm.peers.reader import Answer
from engine_ext.vllm.plan import Pull

RETRY, HIT, MISS = Answer.RETRY, Answer.HIT, Answer.MISS
Keys = Callable[[int, int], list[bytes]]
MakePull = Callable[..., Pull]


def test_all_keys_of_a_step_go_to_their_source_as_one_question(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("a:1", 0, 3), make_pull("b:1", 3, 5))
    assert world.scan(make_keys(0, 5)) == [RETRY] * 5
    asked = [
        (address, keys, tenant, deadline) for address, keys, tenant, deadline in world.link.finds.values()
    ]
    assert asked == [
        ("a:1", make_keys(0, 3), "blue", 1001.0),
        ("b:1", make_keys(3, 5), "blue", 1001.0),
    ]
    assert world.scan(make_keys(0, 5)) == [RETRY] * 5
    assert len(world.link.finds) == 2, "a question is not repeated while it is open"


def test_a_pull_is_rounded_inwards_to_whole_chunks(world: Any, make_keys: Keys) -> None:
    world.begin(Pull(source="a:1", start_token=10, end_token=60, deadline_ms=1000))
    assert world.ask(b"k0") is MISS
    assert world.scan(make_keys(1, 3)) == [RETRY] * 2
    assert world.ask(b"k3") is MISS
    assert [keys for _, keys, _, _ in world.link.finds.values()] == [make_keys(1, 3)]


def test_what_a_source_has_is_a_hit_and_what_it_lacks_a_miss(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("a:1", 0, 4))
    world.scan(make_keys(0, 4))
    world.found(b"k0", b"k1", b"k3")
    assert [world.ask(key) for key in make_keys(0, 4)] == [HIT, HIT, MISS, HIT]
    assert world.counted(LOOKUPS) == {("found",): 3, ("absent",): 1}


def test_a_chunk_is_no_hit_before_every_earlier_chunk_is_known(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("a:1", 0, 2), make_pull("b:1", 2, 4))
    world.scan(make_keys(0, 4))
    first, second = sorted(world.link.finds)
    world.found(*make_keys(2, 4), find=second)
    assert [world.ask(key) for key in make_keys(0, 4)] == [RETRY] * 4
    world.found(*make_keys(0, 2), find=first)
    assert [world.ask(key) for key in make_keys(0, 4)] == [HIT] * 4


def test_at_the_deadline_an_unanswered_question_becomes_a_miss_and_is_dropped(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("a:1", 0, 2, within_s=0.5))
    world.scan(make_keys(0, 2))
    (find,) = world.link.finds
    world.now_s += 0.499
    assert world.ask(b"k0") is RETRY
    world.now_s += 0.001
    assert world.ask(b"k0") is MISS
    assert world.link.forgotten == [find]
    world.hear(Found(find, frozenset(make_keys(0, 2)), 0.6))
    assert world.ask(b"k0") is MISS, "an answer that comes too late changes nothing"
    assert world.counted(LOOKUPS) == {("deadline",): 2}


def test_the_tick_alone_ends_a_question_that_nobody_asks_about_again(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("a:1", 0, 2, within_s=0.5), make_pull("b:1", 2, 3, within_s=5))
    world.scan(make_keys(0, 3))
    world.found(b"k2", find=max(world.link.finds))
    world.now_s += 1
    world.hear()
    assert world.ask(b"k2") is HIT, "it is not held up by questions that are over"


def test_the_plans_deadline_is_capped(world: Any, make_pull: MakePull, make_keys: Keys) -> None:
    world.begin(make_pull("a:1", 0, 1, within_s=600))
    world.scan(make_keys(0, 1))
    assert next(iter(world.link.finds.values()))[3] == 1030.0


@pytest.mark.parametrize("reason", list(NotFoundReason))
def test_no_answer_is_a_miss_under_its_name(
    world: Any, make_pull: MakePull, make_keys: Keys, reason: NotFoundReason
) -> None:
    world.begin(make_pull("a:1", 0, 2))
    world.scan(make_keys(0, 2))
    world.hear(NotFound(max(world.link.finds), reason, "model: theirs"))
    assert world.ask(b"k0") is MISS
    assert world.counted(LOOKUPS) == {(reason.value,): 2}
    assert world.reports.of("failed") == [("r", "a:1", f"{reason.value}:model", 0.0)]


@pytest.mark.parametrize(
    ("detail", "outcome"),
    [
        ("no_connection: nobody takes it", "unreachable:no_connection"),
        ("stranger", "unreachable:stranger"),
        ("", "unreachable"),
        ("RuntimeError('x: y')", "unreachable"),
        ("two words", "unreachable"),
    ],
)
def test_an_outcome_names_more_only_where_the_link_has_a_name_for_it(
    world: Any, make_pull: MakePull, make_keys: Keys, detail: str, outcome: str
) -> None:
    world.begin(make_pull("a:1", 0, 1))
    world.scan(make_keys(0, 1))
    world.hear(NotFound(max(world.link.finds), NotFoundReason.UNREACHABLE, detail))
    assert world.reports.of("failed") == [("r", "a:1", outcome, 0.0)]


def test_a_job_over_two_sources_is_two_pulls_and_one_result(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("a:1", 0, 2, within_s=1), make_pull("b:1", 2, 4, within_s=2))
    world.scan(make_keys(0, 4))
    finds = sorted(world.link.finds)
    for find in finds:
        world.found(*make_keys(0, 4), find=find)
    world.load({key: 10 + i for i, key in enumerate(make_keys(0, 4))})
    assert list(world.link.pulls.values()) == [
        (finds[0], {b"k0": 10, b"k1": 11}, 1001.0),
        (finds[1], {b"k2": 12, b"k3": 13}, 1002.0),
    ]
    one, two = world.link.pulls
    world.hear(BlocksPulled(one, 2000, 0.01))
    assert world.done() == []
    world.now_s += 0.25
    world.hear(BlocksPulled(two, 2000, 0.02))
    assert world.done() == [Finished(7, True, tuple(make_keys(0, 4)), 4000, 0.25)]
    assert world.counted(PULL_BYTES) == {("pointsman",): 4000}
    assert sorted(world.link.forgotten) == finds, "leases go back as soon as everything is here"


def test_a_pull_that_fails_ends_its_job_with_what_arrived_and_holds_what_may_still_be_written(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("a:1", 0, 4))
    world.scan(make_keys(0, 4))
    world.found(*make_keys(0, 4))
    world.load({key: 10 + i for i, key in enumerate(make_keys(0, 4))})
    world.hear(BlocksNotPulled(max(world.link.pulls), FailReason.DEADLINE, (10, 11), (12,)))
    assert list(world.quarantine.held) == [12]
    assert world.done() == [Finished(7, False, (b"k0", b"k1"), 2000, 0.0)]
    assert [world.ask(key) for key in make_keys(2, 4)] == [MISS, MISS], (
        "the engine computes what did not come"
    )
    assert world.counted(PULLS) == {("pointsman", "deadline"): 1}
    world.hear(BlocksReleased((12,), Proof.FINISHED))
    assert list(world.quarantine.held) == []


def test_released_blocks_that_we_did_not_hold_stay_held_by_whoever_did(world: Any) -> None:
    world.quarantine.hold([5])
    world.hear(BlocksReleased((5,), Proof.FINISHED))
    assert list(world.quarantine.held) == [5]


def test_a_request_that_ends_aborts_its_pull_and_the_job_still_ends(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("a:1", 0, 2))
    world.scan(make_keys(0, 2))
    find = world.found(*make_keys(0, 2))
    world.load({b"k0": 1, b"k1": 2})
    world.reader.finished("r", world.now_s)
    assert world.reports.of("finished") == [], "the report waits for the pull's end"
    assert world.done() == [Finished(7, False, (), 0, 0.0)]
    assert sorted(world.quarantine.held) == [1, 2]
    assert world.link.forgotten == [find]
    assert world.reports.of("finished") == [("r",)]
    assert world.ask(b"k0") is MISS


def test_once_scheduled_a_request_keeps_no_lease_and_gets_no_more_hits(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("a:1", 0, 2), make_pull("b:1", 2, 3))
    world.scan(make_keys(0, 3))
    first, second = sorted(world.link.finds)
    world.found(*make_keys(0, 2), find=first)
    world.reader.scheduled("r", world.now_s)
    assert sorted(world.link.forgotten) == [first, second]
    assert world.ask(b"k0") is MISS
    assert world.scan([b"k2"]) == [MISS]
    assert len(world.link.finds) == 2


def test_keys_found_in_a_later_step_are_pulled_under_their_own_lease(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("a:1", 0, 4))
    world.scan(make_keys(0, 2))
    one = world.found(*make_keys(0, 2))
    world.scan(make_keys(0, 4))
    two = world.found(*make_keys(2, 4))
    world.load({key: i for i, key in enumerate(make_keys(0, 4))})
    assert [(find, sorted(pairs)) for find, pairs, _ in world.link.pulls.values()] == [
        (one, make_keys(0, 2)),
        (two, make_keys(2, 4)),
    ]


def test_a_load_of_keys_that_were_never_found_fails_at_once(world: Any, make_pull: MakePull) -> None:
    world.begin(make_pull("a:1", 0, 2))
    world.load({b"k0": 1})
    world.load({b"k0": 1}, job=8, request="unknown")
    assert [(job.job_id, job.complete) for job in world.done()] == [(7, False), (8, False)]
    assert not world.link.pulls


def test_coming_to_rest_aborts_pulls_and_takes_no_new_ones(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("a:1", 0, 2))
    world.scan(make_keys(0, 2))
    world.found(*make_keys(0, 2))
    world.load({b"k0": 1})
    assert world.exchange.quiesce(world.now_s)
    assert [job.complete for job in world.reader.take_finished()] == [False]
    assert list(world.quarantine.held) == [1]
    assert world.ask(b"k1") is MISS


def test_the_report_says_per_source_what_was_asked_found_and_moved(
    world: Any, make_pull: MakePull, make_keys: Keys
) -> None:
    world.begin(make_pull("a:1", 0, 3))
    world.scan(make_keys(0, 3))
    world.found(*make_keys(0, 2))
    world.load({b"k0": 1, b"k1": 2})
    world.now_s += 0.5
    world.hear(BlocksPulled(max(world.link.pulls), 2000, 0.1))
    world.reader.scheduled("r", world.now_s)
    world.reader.finished("r", world.now_s)
    assert world.reports.calls == [
        ("began", "r", "plan-r"),
        ("asked", "r", "plan-r", "a:1", 3, "pointsman"),
        ("answered", "r", "a:1", 2, 1, 0.002),
        ("moved", "r", "a:1", 2, 2000, 0.1, "ok"),
        ("finished", "r"),
    ]
