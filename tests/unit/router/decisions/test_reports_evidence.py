# SPDX-License-Identifier: Apache-2.0
"""Who kept what was promised, by the engine's total and by reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decisions.report import PlanReport, SourceReport
from router.decisions.reports_awaited import Awaited, AwaitedPlans
from router.decisions.reports_evidence import (
    PlanFacts,
    Shares,
    peer_shares,
    plan_report,
    pull_observations,
    shares,
    tier_observations,
    tiers_with_total,
)
from router.decisions.reports_wire import read_batch
from router.decisions.trust import Trust

BATCH = read_batch((Path(__file__).parents[3] / "golden" / "reports" / "batch.json").read_bytes())
WORKERS = {"10.0.0.7:5720": "near", "10.0.0.9:5710": "far"}
FACTS = PlanFacts("w", 1000, {"near": 400, "far": 200}, 0, True)


def peer(outcome: str = "ok", **counts: int) -> SourceReport:
    blocks = {"asked_blocks": 10, "hit_blocks": 10, "missed_blocks": 0, "moved_blocks": 10} | counts
    times = {"lookup_s": 0.25, "transfer_s": 0.5}
    return SourceReport(source="near", kind="pointsman", outcome=outcome, **blocks, **times)


def report_of(*sources: SourceReport) -> PlanReport:
    return PlanReport(tiers={}, sources=sources, block_tokens=16)


# From a message to a report


def test_a_report_names_workers_and_counts_tokens_by_tier() -> None:
    report = plan_report(BATCH, BATCH.reports[0], WORKERS.get)
    assert [one.source for one in report.sources] == ["ram", "near", "far"]
    assert report.tiers == {"ram": 32, "peer": 64}
    assert (report.stale, report.engine, report.engine_request_id) == (True, "boot-b", "cmpl-1")
    other = plan_report(BATCH, BATCH.reports[1], WORKERS.get)
    assert other.sources[0].source == "10.0.0.8:5720", "not of this fleet"
    assert (other.tiers, other.stale) == ({"storage": 64}, False)


@pytest.mark.parametrize(("total", "hbm"), [(None, None), (96, None), (90, None), (100, 4)])
def test_what_no_tier_brought_was_in_hbm(total: int | None, hbm: int | None) -> None:
    tiers = tiers_with_total(plan_report(BATCH, BATCH.reports[0], WORKERS.get), total)
    assert tiers.get("hbm") == hbm
    assert (tiers["ram"], tiers["peer"]) == (32, 64)


# Who is to blame


def test_a_total_alone_blames_the_sources_in_proportion_and_then_the_worker() -> None:
    assert shares(FACTS, 1000, None) == {"near": (400, 400), "far": (200, 200), "w": (400, 400)}
    assert shares(FACTS, 700, None) == {"near": (400, 200), "far": (200, 100), "w": (400, 400)}
    assert shares(FACTS, 300, None) == {"near": (400, 0), "far": (200, 0), "w": (400, 300)}
    assert shares(FACTS, None, None) == {}


def test_a_report_tells_the_sources_apart_and_leaves_the_worker_the_rest() -> None:
    reported = {"near": (400, 400), "far": (200, 50)}
    assert shares(FACTS, None, reported) == reported
    assert shares(FACTS, 850, reported) == reported | {"w": (400, 400)}
    assert shares(FACTS, 800, reported) == reported | {"w": (400, 350)}


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        (peer(), 160),
        (peer(hit_blocks=7, missed_blocks=3, stale_blocks=3, moved_blocks=7), 112),
        (peer("deadline", moved_blocks=2), 32),
        (peer("refused:model", hit_blocks=0, missed_blocks=10, moved_blocks=0), 0),
        (peer("aborted", moved_blocks=2), 160),
        (peer("not_needed", moved_blocks=0), 160),
        (peer("closed", moved_blocks=0, stale_blocks=3, hit_blocks=7, missed_blocks=3), 112),
        (peer("unanswered", hit_blocks=0, moved_blocks=0, missed_blocks=10), 160),
    ],
)
def test_a_peer_answers_for_what_it_lacked_and_did_not_deliver(source: SourceReport, kept: int) -> None:
    assert peer_shares(report_of(source), 16) == {"near": (160, kept)}


def test_tiers_of_the_worker_itself_are_no_peers() -> None:
    ram = SourceReport(source="ram", kind="ram", asked_blocks=5, hit_blocks=0, missed_blocks=5)
    assert peer_shares(report_of(ram), 16) == {}


# What is learnt


def test_parts_of_pulls_and_loads_are_taken_for_calibration() -> None:
    report = plan_report(BATCH, BATCH.reports[0], WORKERS.get)
    near, far = pull_observations(FACTS, report, blamed=False)
    assert (near.source, near.worker, near.tokens) == ("near", "w", 48)
    assert (near.lookup_s, near.transfer_s, near.failed) == (0.25, 0.5, False)
    assert (far.lookup_s, far.transfer_s, far.failed) == (None, None, True)
    assert [one.failed for one in pull_observations(FACTS, report, blamed=True)] == [False, False]
    [promotion] = tier_observations(FACTS, report)
    assert (promotion.tier, promotion.tokens, promotion.seconds) == ("ram", 96, 0.0625)
    [storage] = tier_observations(FACTS, plan_report(BATCH, BATCH.reports[1], WORKERS.get))
    assert (storage.tier, storage.tokens, storage.seconds) == ("storage", 64, 1.0)


# Trust is told once, whichever comes first


def awaited() -> Awaited:
    return Awaited(record=None, facts=FACTS)  # type: ignore[arg-type]


def trust_after(steps: list[str], total: int, reported: Shares) -> dict[str, tuple[float, float]]:
    """(promised, kept) that trust has of each worker."""
    trust = Trust()
    plans = AwaitedPlans(10, trust)
    one = awaited()
    plans.expect("p", one)
    for step in steps:
        if step == "total":
            plans.counted("p", FACTS, total, 5.0)
        else:
            plans.reported(one, reported, 5.0)
    return {worker: trust.record(worker)[:2] for worker in ("near", "far", "w")}


@pytest.mark.parametrize("total", [1000, 900, 700, 100])
@pytest.mark.parametrize("far_kept", [200, 150, 0])
def test_the_order_of_total_and_report_makes_no_difference(total: int, far_kept: int) -> None:
    reported = {"near": (400, 400), "far": (200, far_kept)}
    first = trust_after(["total", "report"], total, reported)
    second = trust_after(["report", "total"], total, reported)
    for worker in first:
        # A worker that never disappointed has no record, and one that was wrongly suspected one without loss.
        assert first[worker] == pytest.approx(second[worker], rel=0.01) or (
            first[worker][0] == first[worker][1] and second[worker][0] == second[worker][1]
        )


def test_a_report_clears_the_source_that_the_total_had_blamed() -> None:
    reported = {"near": (400, 400), "far": (200, 0)}
    blamed = trust_after(["total"], 800, reported)
    assert blamed["near"][1] < blamed["near"][0]
    cleared = trust_after(["total", "report"], 800, reported)
    assert cleared["near"][0] == cleared["near"][1]
    assert cleared["far"] == (200.0, 0.0)


def test_a_source_that_is_known_to_have_failed_later_is_held_to_it() -> None:
    found = trust_after(["total", "report"], 1000, {"far": (200, 0)})
    assert found["far"] == (200.0, 0.0), "the blocks were found elsewhere, and were not at the source"


@given(st.integers(0, 1200), st.integers(0, 400), st.integers(0, 200))
def test_nobody_kept_more_than_was_promised(total: int, near: int, far: int) -> None:
    for reported in (None, {"near": (400, near), "far": (200, far)}):
        for promised, kept in shares(FACTS, total, reported).values():
            assert 0 <= kept <= promised


def test_repeated_failures_lower_a_peer_s_trust_and_time_mends_it() -> None:
    trust = Trust()
    plans = AwaitedPlans(100, trust)
    big = PlanFacts("w", 16_000, {"near": 16_000}, 0, True)
    seen = []
    for number in range(6):
        one = Awaited(record=None, facts=big)  # type: ignore[arg-type]
        plans.expect(f"p{number}", one)
        plans.reported(one, {"near": (16_000, 0)}, 10.0 * number)
        seen.append(trust.of("near", 10.0 * number))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 0.35
    assert trust.of("w", 60.0) == 1.0
    assert trust.of("near", 4000.0) > 0.99


def test_only_the_last_plans_are_awaited() -> None:
    plans = AwaitedPlans(2, Trust())
    for number in range(3):
        plans.expect(f"p{number}", awaited())
    assert len(plans) == 2
    assert plans.find("p0") is None
    assert plans.find("p2") is not None
