# SPDX-License-Identifier: Apache-2.0
"""One report per request from what tiers say of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.vllm.reports.aggregate import UNANSWERED, Aggregator
from engine_ext.vllm.reports.messages import BOUNDS, SourceReport, encode_batch, encode_report

from .story import BLOCK_TOKENS, ENGINE, NEAR, tell

GOLDEN = Path(__file__).parents[4] / "golden" / "reports" / "batch.json"


def source_of(told: Aggregator) -> SourceReport:
    """The only source of the only report."""
    told.finished("r", 1.0)
    [report] = told.take()
    [source] = report.sources
    return source


def test_the_batch_is_the_one_that_routers_read() -> None:
    told = Aggregator()
    tell(told)
    body = encode_batch(ENGINE, BLOCK_TOKENS, [encode_report(one) for one in told.take()], 3)
    assert body == GOLDEN.read_bytes().strip()


def test_blocks_of_several_rounds_at_one_source_are_added() -> None:
    told = Aggregator()
    for asked, hit in ((10, 10), (6, 4)):
        told.asked("r", "p", NEAR, asked)
        told.answered("r", NEAR, hit, asked - hit, 0.5 / asked)
        told.moved("r", NEAR, hit, hit * 100, 0.25)
    one = source_of(told)
    assert (one.asked_blocks, one.hit_blocks, one.missed_blocks, one.stale_blocks) == (16, 14, 2, 2)
    assert (one.moved_blocks, one.bytes, one.transfer_s, one.outcome) == (14, 1400, 0.5, "ok")
    assert one.lookup_s == 0.5 / 6, "the longest"


def test_only_a_peer_that_answers_can_be_stale() -> None:
    told = Aggregator()
    told.asked("r", "p", "ram", 5)
    told.answered("r", "ram", 0, 5, 0.0)
    assert source_of(told).stale_blocks == 0
    told.asked("r", "p", NEAR, 5)
    told.failed("r", NEAR, "deadline", 0.5)
    silent = source_of(told)
    assert (silent.missed_blocks, silent.stale_blocks, silent.outcome) == (5, 0, "deadline")


def test_a_source_that_never_answered_says_so() -> None:
    told = Aggregator()
    told.asked("r", "p", NEAR, 5)
    one = source_of(told)
    assert (one.missed_blocks, one.lookup_s, one.transfer_s, one.outcome) == (5, None, None, UNANSWERED)


def test_the_first_failure_of_a_source_stays_and_is_a_word() -> None:
    told = Aggregator()
    told.asked("r", "p", NEAR, 5)
    told.failed("r", NEAR, "Refused: the model differs", 0.5)
    told.moved("r", NEAR, 0, 0, 0.5, "deadline")
    assert source_of(told).outcome == "refused:the model differs"
    told.asked("r", "p", NEAR, 5)
    told.failed("r", NEAR, "x" * 1000, 0.5)
    assert len(source_of(told).outcome) == BOUNDS.text


def test_a_request_that_nothing_is_said_of_has_no_report() -> None:
    told = Aggregator()
    told.began("r", "p")
    told.finished("r", 1.0)
    told.answered("unknown", NEAR, 1, 0, 0.5)
    told.promoted("unknown", 1, 100, 0.5)
    told.finished("unknown", 1.0)
    assert told.take() == []


def test_evictions_after_the_end_make_one_revision_each_time_reports_are_taken() -> None:
    told = Aggregator()
    told.asked("r", "p", NEAR, 5)
    told.finished("r", 1.0)
    [first] = told.take()
    assert (first.revision, first.evicted_before_reuse_blocks) == (0, 0)
    told.evicted("r", 1)
    told.evicted("r", 2)
    [second] = told.take()
    assert (second.revision, second.evicted_before_reuse_blocks) == (1, 3)
    assert second.sources == first.sources
    told.evicted("r", 1)
    [third] = told.take()
    assert (third.revision, third.evicted_before_reuse_blocks) == (2, 4)
    assert told.take() == []


def test_an_id_that_the_engine_uses_again_is_another_report() -> None:
    told = Aggregator()
    told.asked("r", "p1", NEAR, 5)
    told.asked("r", "p2", NEAR, 7)
    told.finished("r", 1.0)
    assert [(one.plan_id, one.sources[0].asked_blocks) for one in told.take()] == [("p1", 5), ("p2", 7)]


def test_the_longest_open_request_is_reported_when_too_many_are_open() -> None:
    told = Aggregator(most_open=2)
    for number in range(3):
        told.asked(f"r{number}", f"p{number}", NEAR, number)
    assert [one.plan_id for one in told.take()] == ["p0"]
    told.end_all(1.0)
    assert [one.plan_id for one in told.take()] == ["p1", "p2"]


def test_only_the_last_reports_are_kept_for_evictions() -> None:
    told = Aggregator(most_closed=2)
    for number in range(3):
        told.asked(f"r{number}", f"p{number}", NEAR, 1)
        told.finished(f"r{number}", 1.0)
    told.take()
    for number in range(3):
        told.evicted(f"r{number}", 1)
    assert [one.plan_id for one in told.take()] == ["p1", "p2"]


def test_a_report_has_no_more_sources_than_a_router_takes() -> None:
    told = Aggregator()
    for number in range(BOUNDS.sources + 5):
        told.asked("r", "p", f"10.0.0.1:{number}", 1)
    told.finished("r", 1.0)
    [report] = told.take()
    assert len(report.sources) == BOUNDS.sources


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["asked", "answered", "failed", "moved", "promoted", "evicted", "finished"]),
            st.sampled_from(["r0", "r1"]),
            st.integers(-3, 9),
            st.floats(-1.0, 9.0),
        ),
        max_size=40,
    )
)
def test_whatever_is_said_counts_stay_within_what_a_router_takes(
    said: list[tuple[str, str, int, float]],
) -> None:
    told = Aggregator()
    for what, req_id, blocks, seconds in said:
        if what == "asked":
            told.asked(req_id, f"p-{req_id}", NEAR, blocks)
        elif what == "answered":
            told.answered(req_id, NEAR, blocks, 1, seconds)
        elif what == "failed":
            told.failed(req_id, NEAR, "deadline", seconds)
        elif what == "moved":
            told.moved(req_id, NEAR, blocks, blocks * 10, seconds)
        elif what == "promoted":
            told.promoted(req_id, blocks, blocks * 10, seconds)
        elif what == "evicted":
            told.evicted(req_id, blocks)
        else:
            told.finished(req_id, 1.0)
    told.end_all(2.0)
    for report in told.take():
        assert min(report.promoted_blocks, report.promotion_bytes, report.evicted_before_reuse_blocks) >= 0
        assert report.promotion_s is None or report.promotion_s >= 0
        for one in report.sources:
            assert one.hit_blocks >= one.moved_blocks >= 0
            assert one.missed_blocks == max(one.asked_blocks - one.hit_blocks, 0)
            assert min(one.bytes, one.lookup_s or 0.0, one.transfer_s or 0.0) >= 0


@pytest.mark.parametrize("name", ["ram", "storage"])
def test_the_kind_of_our_own_tiers_follows_from_their_names(name: str) -> None:
    told = Aggregator()
    told.asked("r", "p", name, 1)
    assert source_of(told).kind == name
