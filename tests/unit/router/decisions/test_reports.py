# SPDX-License-Identifier: Apache-2.0
"""Reports join the decisions that they are about."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from router.decisions.reports import ReportDesk, Taken, addresses
from router.decisions.reports_metrics import ReportMetrics
from router.decisions.reports_wire import MalformedReportsError
from router.fleet.worker import WorkerSpec
from router.outcomes import RoutedAttempt
from router.request import Outcome, Usage

from ..dispatch.conftest import BLOCK, MODEL, Desk  # noqa: TID252
from ..dispatch.lines import Lines  # noqa: TID252
from ..dispatch.test_split import BODY as SPLIT_BODY  # noqa: TID252
from ..dispatch.test_split import SplitDesk, fleet  # noqa: TID252

PROMPT = list(range(100, 100 + 200 * BLOCK + 5))
N = len(PROMPT)


@pytest.fixture
def desk() -> Desk:
    """Worker ``b`` pulls what ``a``, which is draining, has in RAM."""
    desk = Desk()
    for worker in ("a", "b"):
        desk.add(worker, p2p=f"10.0.0.{ord(worker)}:7000")
    desk.store("a", PROMPT, in_ram=True)
    desk.fleet.set_drain("a", drain=True)
    return desk


@pytest.fixture
def reports(desk: Desk) -> ReportDesk:
    metrics = ReportMetrics(desk.metrics.registry)
    return ReportDesk(desk.recorder, desk.fleet, desk.calibration, metrics, desk.clock)


async def begin(desk: Desk, **body: Any) -> RoutedAttempt:
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT, "stream": True} | body)
    await asyncio.sleep(0)
    return attempt


async def end(desk: Desk, attempt: RoutedAttempt, cached: int, ttft_s: float = 0.1) -> None:
    desk.now_s += ttft_s
    attempt.first_byte()
    attempt.usage(Usage(prompt_tokens=N, completion_tokens=3, cached_tokens=cached))
    attempt.finish(Outcome.OK, 200)
    await asyncio.sleep(0)


def source(**fields: Any) -> dict[str, Any]:
    """A pull from ``a`` of all 200 blocks, all of which came."""
    return {
        "source": f"10.0.0.{ord('a')}:7000",
        "kind": "pointsman",
        "asked_blocks": 200,
        "hit_blocks": 200,
        "missed_blocks": 0,
        "stale_blocks": 0,
        "moved_blocks": 200,
        "bytes": 200_000,
        "lookup_s": 0.002,
        "transfer_s": 0.02,
        "outcome": "ok",
    } | fields


MISSED = {"hit_blocks": 150, "missed_blocks": 50, "stale_blocks": 50, "moved_blocks": 150}


def batch(plan_id: str, *sources: dict[str, Any], dropped: int = 0, **fields: Any) -> bytes:
    report = {
        "plan_id": plan_id,
        "revision": 0,
        "request_id": "cmpl-1",
        "ended_unix_s": 1_700_000_000.0,
        "sources": sources,
        "promoted_blocks": 200,
        "promotion_bytes": 200_000,
        "promotion_s": 0.01,
        "evicted_before_reuse_blocks": 0,
    } | fields
    whole = {"version": 1, "engine": "e", "block_tokens": BLOCK, "reports": [report], "dropped": dropped}
    return msgspec.json.encode(whole)


async def test_a_report_of_a_pull_is_on_its_record(desk: Desk, reports: ReportDesk) -> None:
    attempt = await begin(desk)
    assert attempt.record.source == "a"
    await end(desk, attempt, 200 * BLOCK)
    assert reports.take(batch(attempt.record.plan_id, source())) == Taken(joined=1)
    observed = attempt.record.observed
    assert observed.report is not None
    [shown] = observed.report.sources
    assert (shown.source, shown.hit_blocks, shown.bytes, shown.transfer_s) == ("a", 200, 200_000, 0.02)
    assert observed.tiers == {"peer": 200 * BLOCK} == attempt.record.predicted_tiers
    assert (observed.stale, observed.report.stale) == (False, False)
    assert desk.trust.of("a", desk.now_s) == 1.0
    assert desk.count("pointsman_reports_total", outcome="joined") == 1
    assert desk.count("pointsman_report_bytes_total", path="peer") == 200_000
    assert desk.count("pointsman_report_bytes_total", path="promotion") == 200_000
    assert desk.count("pointsman_report_pulls_total", source="a", outcome="ok") == 1


async def test_the_plan_id_is_the_attempt_s_transfer_id_and_never_used_again(desk: Desk) -> None:
    first, second = await begin(desk), await begin(desk)
    params = first.record.transfer_params
    assert params is not None
    assert params["remote_kv_source"]["kv_request_id"] == first.record.plan_id  # type: ignore[index]
    assert first.record.plan_id != second.record.plan_id


@pytest.mark.parametrize("report_first", [False, True])
async def test_blocks_that_were_not_there_make_a_record_stale_and_cost_the_source_trust(
    desk: Desk, reports: ReportDesk, report_first: bool
) -> None:
    attempt = await begin(desk)
    body = batch(attempt.record.plan_id, source(**MISSED))
    if report_first:
        reports.take(body)
        assert attempt.record.observed.stale is True
    await end(desk, attempt, 150 * BLOCK)
    if not report_first:
        reports.take(body)
    observed = attempt.record.observed
    assert observed.report is not None
    assert (observed.stale, observed.report.stale) == (True, True)
    assert desk.trust.record("a")[:2] == (pytest.approx(200 * BLOCK), pytest.approx(150 * BLOCK))
    assert desk.trust.of("b", desk.now_s) == 1.0
    assert desk.count("pointsman_report_stale_blocks_total", source="a") == 50


async def test_what_the_engine_found_in_its_own_cache_is_no_report_s(desk: Desk, reports: ReportDesk) -> None:
    attempt = await begin(desk)
    reports.take(batch(attempt.record.plan_id, source(moved_blocks=150, hit_blocks=200)))
    assert attempt.record.observed.tiers == {"peer": 150 * BLOCK}
    await end(desk, attempt, 200 * BLOCK)
    assert attempt.record.observed.tiers == {"hbm": 50 * BLOCK, "peer": 150 * BLOCK}


async def test_a_repeated_report_changes_nothing(desk: Desk, reports: ReportDesk) -> None:
    attempt = await begin(desk)
    body = batch(attempt.record.plan_id, source(**MISSED), dropped=4)
    assert reports.take(body) == Taken(joined=1)
    trust, costs = desk.trust.record("a"), desk.calibration.reported
    assert reports.take(body) == Taken(duplicate=1)
    assert (desk.trust.record("a"), desk.calibration.reported) == (trust, costs)
    assert desk.count("pointsman_report_stale_blocks_total", source="a") == 50
    assert desk.count("pointsman_reports_total", outcome="dropped") == 4
    reports.take(batch("unknown", dropped=6))
    assert desk.count("pointsman_reports_total", outcome="dropped") == 6


async def test_a_revision_tells_of_evictions_and_is_not_learnt_from_again(
    desk: Desk, reports: ReportDesk
) -> None:
    attempt = await begin(desk)
    plan_id = attempt.record.plan_id
    reports.take(batch(plan_id, source(), evicted_before_reuse_blocks=1))
    learnt = desk.calibration.reported
    revised = batch(plan_id, source(), revision=1, evicted_before_reuse_blocks=5)
    assert reports.take(revised) == Taken(revised=1)
    assert reports.take(batch(plan_id, source(), revision=0)) == Taken(duplicate=1), "overtaken"
    report = attempt.record.observed.report
    assert report is not None
    assert (report.revision, report.evicted_before_reuse_blocks) == (1, 5)
    assert desk.count("pointsman_report_evicted_blocks_total", worker="b") == 5
    assert desk.calibration.reported == learnt
    assert desk.count("pointsman_report_pulls_total", source="a", outcome="ok") == 1


async def test_a_plan_of_another_replica_is_counted(desk: Desk, reports: ReportDesk) -> None:
    assert reports.take(batch("pm-elsewhere", source(**MISSED))) == Taken(unknown=1)
    assert desk.count("pointsman_reports_total", outcome="unknown") == 1
    assert desk.trust.of("a", desk.now_s) == 1.0
    assert desk.calibration.reported == 0


async def test_nothing_of_a_malformed_batch_is_taken(desk: Desk, reports: ReportDesk) -> None:
    attempt = await begin(desk)
    with pytest.raises(MalformedReportsError):
        reports.take(batch(attempt.record.plan_id, source(), dropped=-1))
    assert attempt.record.observed.report is None
    assert desk.count("pointsman_reports_total", outcome="malformed") == 1


@pytest.mark.parametrize("early", [True, False])
async def test_the_log_has_the_report_and_no_outcome_before_the_end(
    desk: Desk, reports: ReportDesk, early: bool
) -> None:
    lines = Lines()
    desk.recorder.writer = lines  # type: ignore[assignment]
    attempt = await begin(desk)
    if early:
        reports.take(batch(attempt.record.plan_id, source()))
        assert lines.joined().finished == set()
    await end(desk, attempt, 200 * BLOCK)
    if not early:
        reports.take(batch(attempt.record.plan_id, source()))
    [logged] = lines.joined().records.values()
    assert logged.plan_id == attempt.record.plan_id
    assert logged.observed.report == attempt.record.observed.report
    assert logged.observed.report is not None
    assert logged.observed.outcome == "ok"


async def test_a_slow_transfer_slows_its_link(desk: Desk, reports: ReportDesk) -> None:
    before = desk.calibration.link("a", "b")
    attempt = await begin(desk, stream=False)
    reports.take(batch(attempt.record.plan_id, source(transfer_s=5.0)))
    after = desk.calibration.link("a", "b")
    assert after.bytes_per_s < before.bytes_per_s / 1.5
    assert desk.calibration.model_for("b").profile.prefill_s_per_token == pytest.approx(
        desk.calibration.profile.prefill_s_per_token
    )


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_deadline_slows_its_link_once(desk: Desk, reports: ReportDesk, streamed: bool) -> None:
    attempt = await begin(desk, stream=streamed)
    before = desk.calibration.link("a", "b").bytes_per_s
    await end(desk, attempt, 0, ttft_s=5.0)
    seen = desk.calibration.link("a", "b").bytes_per_s
    assert (seen < before / 2) == streamed, "a time to first token shows it too"
    nothing = source(outcome="deadline", moved_blocks=0, bytes=0, transfer_s=5.0)
    reports.take(batch(attempt.record.plan_id, nothing, promotion_s=None, promoted_blocks=0))
    told = desk.calibration.link("a", "b").bytes_per_s
    assert told < before / 2
    assert not streamed or told == seen


async def test_a_report_of_what_a_client_planned_itself_is_shown_and_not_learnt_from() -> None:
    desk = Desk(trust_transfer_params=True)
    for worker in ("a", "b"):
        desk.add(worker, p2p=f"10.0.0.{ord(worker)}:7000")
    reports = ReportDesk(
        desk.recorder, desk.fleet, desk.calibration, ReportMetrics(desk.metrics.registry), desk.clock
    )
    attempt = await begin(desk, kv_transfer_params={"pointsman": {"plan_id": "x"}})
    reports.take(batch(attempt.record.plan_id, source(**MISSED)))
    assert attempt.record.observed.report is not None
    assert (desk.trust.of("a", desk.now_s), desk.calibration.reported) == (1.0, 0)


async def test_words_and_sources_that_nobody_knows_make_no_metrics(desk: Desk, reports: ReportDesk) -> None:
    attempt = await begin(desk)
    strange = source(source="192.168.0.1:1", outcome="made:up")
    reports.take(batch(attempt.record.plan_id, strange))
    assert desk.count("pointsman_report_pulls_total", source="unknown", outcome="other") == 1
    assert desk.trust.record("192.168.0.1:1") == (0.0, 0.0, 0.0)
    assert desk.calibration.snapshot()["links"] == []


async def test_a_worker_that_left_is_not_learnt_of(desk: Desk, reports: ReportDesk) -> None:
    attempt = await begin(desk)
    desk.fleet.remove("a")
    desk.fleet.remove("b")
    reports.take(batch(attempt.record.plan_id, source(**MISSED), evicted_before_reuse_blocks=2))
    assert desk.calibration.reported == 0
    assert desk.count("pointsman_report_evicted_blocks_total", worker="b") == 0
    assert desk.trust.record("a") == (0.0, 0.0, 0.0)


def test_ranks_are_at_the_ports_after_the_first(desk: Desk) -> None:
    desk.fleet.add(WorkerSpec("c", "http://c", ranks=2, p2p="[fd00::1]:7000"))
    worker_at = addresses(desk.fleet)
    assert worker_at("10.0.0.97:7000") == "a"
    assert worker_at("10.0.0.97:7001") is None
    assert worker_at("[fd00::1]:7001") == worker_at("fd00::1:7001") == "c"


# Split requests


async def test_each_leg_of_a_split_request_has_its_own_report() -> None:
    desk = SplitDesk()
    fleet(desk)
    metrics = ReportMetrics(desk.metrics.registry)
    reports = ReportDesk(desk.recorder, desk.fleet, desk.calibration, metrics, desk.clock)
    attempt = await desk.dispatch(SPLIT_BODY)
    await asyncio.sleep(0)
    record, leg = attempt.record, attempt.record.prefill
    assert leg is not None
    assert len({record.plan_id, leg.plan_id, ""}) == 3
    ram = source(source="ram", kind="ram", asked_blocks=2, hit_blocks=2, moved_blocks=0, bytes=0)
    handed = source(source=f"10.0.0.{ord('p')}:7000", kind="p2p", **MISSED)
    assert reports.take(batch(leg.plan_id, ram)) == Taken(joined=1)
    assert reports.take(batch(record.plan_id, handed)) == Taken(joined=1)
    assert leg.observed.tiers == {"ram": 2 * BLOCK}
    assert record.observed.tiers == {"peer": 150 * BLOCK}
    assert desk.trust.of("p", desk.now_s) == 1.0, "what is handed over was never in a map"
    assert [one["source"] for one in desk.calibration.snapshot()["links"]] == []
