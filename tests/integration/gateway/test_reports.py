# SPDX-License-Identifier: Apache-2.0
"""Engine extensions report to a gateway in front of simulated workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from eventually import eventually
from service import BLOCK, CALM, MODEL, Reply, Service, entry, service, sim_workers

from engine_ext.vllm.reports.config import ReportConfig
from engine_ext.vllm.reports.reporter import Reporter
from router.decisions.reports_wire import MOST_BYTES

GOLDEN = Path(__file__).parents[2] / "golden" / "reports" / "batch.json"
REPORTS = "/admin/api/reports"
BLOCK_BYTES = 1000
TOKEN, REPORT_TOKEN = "sesame", "only-reports"


def golden_for(plan_id: str, **source: object) -> bytes:
    """The golden batch with its first report for this plan."""
    document: Any = json.loads(GOLDEN.read_bytes())
    document["reports"][0]["plan_id"] = plan_id
    document["reports"][0]["sources"][1] |= source
    return json.dumps(document).encode()


async def pulled(one: Service, first: str, second: str) -> tuple[Reply, dict[str, Any]]:
    """An answer of the second worker with blocks pulled from the first, and its decision."""
    prompt = [Random(1).randrange(97, 123) for _ in range(200 * BLOCK + 3)]
    await one.drain(second)
    assert (await one.complete(prompt)).worker == first

    async def known() -> bool:
        return len(one.known(first)) == 200 and all("ram" in tiers for tiers in one.known(first).values())

    await eventually(known, "blocks of the first worker in RAM")
    await one.drain(first)
    await one.drain(second, draining=False)
    reply = await one.complete(prompt)
    record: dict[str, Any] = await one.decision(reply)
    assert (record["worker"], record["source"]) == (second, first)
    return reply, record


async def test_the_report_of_a_pull_is_shown_with_its_decision(tmp_path: Path) -> None:
    async with sim_workers(2) as workers, service([entry(w) for w in workers], tmp_path, CALM) as one:
        first, second = (worker.url.removeprefix("http://") for worker in workers)
        reply, record = await pulled(one, first, second)
        source = workers[0].p2p
        assert source is not None
        reporter = Reporter(ReportConfig(urls=(one.url,), interval_s=0.01), "boot", BLOCK)
        reporter.asked("cmpl-1", record["plan_id"], source, 200)
        reporter.answered("cmpl-1", source, 200, 0, 0.002)
        reporter.moved("cmpl-1", source, 200, 200 * BLOCK_BYTES, 0.01)
        reporter.promoted("cmpl-1", 200, 200 * BLOCK_BYTES, 0.004)
        reporter.finished("cmpl-1")

        async def reported() -> Any:
            return (await one.decision(reply))["observed"]["report"]

        report = await eventually(reported, "a report that is not joined")
        await asyncio.to_thread(reporter.close, 20.0)
        assert reporter.counts() == (0, 1, 0, 0)
        [shown] = report["sources"]
        assert (shown["source"], shown["asked_blocks"], shown["hit_blocks"]) == (first, 200, 200)
        assert (shown["stale_blocks"], shown["outcome"]) == (0, "ok")
        assert shown["bytes"] == shown["moved_blocks"] * BLOCK_BYTES
        assert (report["stale"], report["promotion_s"]) == (False, 0.004)
        observed = (await one.decision(reply))["observed"]
        assert observed["tiers"] == {"peer": 200 * BLOCK}
        assert observed["stale"] is False
        assert await one.metric("pointsman_reports_total", outcome="joined") == 1
        assert await one.metric("pointsman_report_bytes_total", path="peer") == 200 * BLOCK_BYTES
        costs = (await one.get("/admin/api/costs"))["calibration"]
        assert costs["reported"] == 2
        [link] = costs["links"]
        assert (link["source"], link["destination"]) == (first, second)


async def test_a_report_of_blocks_that_were_not_there_is_stale_and_costs_trust(tmp_path: Path) -> None:
    async with sim_workers(2) as workers, service([entry(w) for w in workers], tmp_path, CALM) as one:
        first, second = (worker.url.removeprefix("http://") for worker in workers)
        reply, record = await pulled(one, first, second)
        blocks = {"asked_blocks": 200, "hit_blocks": 50, "missed_blocks": 150, "stale_blocks": 150}
        body = golden_for(record["plan_id"], source=workers[0].p2p, moved_blocks=50, **blocks)
        answer = await one.post(REPORTS, body)
        assert (answer.status, answer.json) == (
            200,
            {"joined": 1, "revised": 0, "duplicate": 0, "unknown": 1},
        )
        assert (await one.post(REPORTS, body)).json["duplicate"] == 1
        observed = (await one.decision(reply))["observed"]
        assert observed["stale"] is True
        assert observed["report"]["sources"][1]["stale_blocks"] == 150
        rows = await one.workers()
        assert rows[first]["trust"] < 0.97
        assert rows[second]["trust"] == 1.0
        assert await one.metric("pointsman_report_stale_blocks_total", source=first) == 150


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"version": 9}', golden_for("p", kind="cloud")])
async def test_what_is_no_batch_is_answered_400(tmp_path: Path, body: bytes) -> None:
    async with service([], tmp_path) as one:
        answer = await one.post(REPORTS, body)
        assert answer.status == 400
        assert answer.json["error"]["type"] == "MalformedReportsError"


async def test_more_than_a_batch_may_have_is_answered_413(tmp_path: Path) -> None:
    async with service([], tmp_path) as one:
        assert (await one.post(REPORTS, b" " * MOST_BYTES)).status == 400
        assert (await one.post(REPORTS, b" " * (MOST_BYTES + 1))).status == 413


@pytest.mark.parametrize(
    ("settings", "given", "status", "admin_status"),
    [
        ({}, None, 200, 200),
        ({"admin.token": TOKEN}, None, 401, 401),
        ({"admin.token": TOKEN}, TOKEN, 200, 200),
        ({"admin.token": TOKEN, "admin.report_token": REPORT_TOKEN}, TOKEN, 200, 200),
        ({"admin.token": TOKEN, "admin.report_token": REPORT_TOKEN}, REPORT_TOKEN, 200, 401),
        ({"admin.token": TOKEN, "admin.report_token": REPORT_TOKEN}, REPORT_TOKEN + "x", 401, 401),
        ({"admin.report_token": REPORT_TOKEN}, None, 401, 200),
        ({"admin.report_token": REPORT_TOKEN}, REPORT_TOKEN, 200, 200),
        ({"admin.enabled": False}, None, 404, 404),
        ({"admin.enabled": False, "admin.report_token": REPORT_TOKEN}, REPORT_TOKEN, 200, 404),
        ({"admin.enabled": False, "admin.token": TOKEN, "admin.report_token": REPORT_TOKEN}, TOKEN, 401, 404),
    ],
)
async def test_the_token_of_reports_opens_nothing_else(
    tmp_path: Path, settings: Mapping[str, object], given: str | None, status: int, admin_status: int
) -> None:
    headers = {"authorization": f"Bearer {given}"} if given else {}
    async with service([], tmp_path, settings) as one:
        assert (await one.post(REPORTS, GOLDEN.read_bytes(), headers)).status == status
        async with one.session.get(one.url + "/admin/api/workers", headers=headers) as answer:
            assert answer.status == admin_status


async def test_reports_do_not_hold_up_a_split_or_plain_request(tmp_path: Path) -> None:
    async with sim_workers(1) as workers, service([entry(w) for w in workers], tmp_path, CALM) as one:
        answers = await asyncio.gather(
            *(one.post(REPORTS, golden_for(f"pm-{n}")) for n in range(20)),
            *(one.complete([97 + n] * 40) for n in range(5)),
        )
        assert [answer.status for answer in answers] == [200] * 25
        assert await one.metric("pointsman_reports_total", outcome="unknown") == 40
        assert (await one.get("/admin/api/decisions"))["decisions"][0]["model"] == MODEL
