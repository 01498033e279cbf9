# SPDX-License-Identifier: Apache-2.0
"""Reports on their way to routers that are there, away, slow, restarted, or refuse them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
from eventually import eventually

from engine_ext.vllm.reports import mailing, reporter
from engine_ext.vllm.reports.config import ReportConfig
from engine_ext.vllm.reports.reporter import Reporter
from engine_ext.vllm.reports.shared import open_reports
from engine_ext.vllm.reports.sink import NoReports

from .scripted_router import ScriptedRouter
from .story import BLOCK_TOKENS, ENGINE, NEAR

MakeRouter = Callable[..., Awaitable[ScriptedRouter]]
MakeReporter = Callable[..., Reporter]


@pytest.fixture
async def make_router() -> AsyncIterator[MakeRouter]:
    routers: list[ScriptedRouter] = []

    async def make(**fields: Any) -> ScriptedRouter:
        routers.append(await ScriptedRouter(**fields).start())
        return routers[-1]

    yield make
    for one in routers:
        await one.stop()


@pytest.fixture
def make_reporter() -> Iterator[MakeReporter]:
    reporters: list[Reporter] = []

    def make(*urls: str, **options: Any) -> Reporter:
        config = ReportConfig(urls=urls, **{"interval_s": 0.01, "timeout_s": 20.0, **options})
        reporters.append(Reporter(config, ENGINE, BLOCK_TOKENS))
        return reporters[-1]

    yield make
    for one in reporters:
        one.close(0.0)


@pytest.fixture(autouse=True)
def _quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailing, "_BACKOFF_MIN_S", 0.02)
    monkeypatch.setattr(mailing, "_BACKOFF_MAX_S", 0.05)


def say(one: Reporter, *plans: str) -> None:
    for plan in plans:
        one.asked(f"r-{plan}", plan, NEAR, 2)
        one.answered(f"r-{plan}", NEAR, 2, 0, 0.5)
        one.finished(f"r-{plan}")


def threads_of(*routers: ScriptedRouter) -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.endswith(tuple(r.url for r in routers))]


def arrived(one: Reporter, reports: int) -> bool:
    waiting, sent, dropped, _ = one.counts()
    return waiting + sent + dropped == reports


async def until(look: Callable[[], Any], what: str) -> None:
    async def seen() -> Any:
        return look()

    await eventually(seen, what)


async def test_reports_reach_every_router_in_order(
    make_router: MakeRouter, make_reporter: MakeReporter
) -> None:
    routers = [await make_router(), await make_router()]
    one = make_reporter(*(router.url for router in routers), token="t0ken")  # noqa: S106
    plans = [f"p{number}" for number in range(50)]
    say(one, *plans)
    for router in routers:
        await until(lambda router=router: router.plans == plans, "reports that are missing")
        assert {body["engine"] for body in router.bodies} == {ENGINE}
        assert {body["block_tokens"] for body in router.bodies} == {BLOCK_TOKENS}
        assert set(router.tokens) == {"Bearer t0ken"}
    await until(lambda: one.counts() == (0, 100, 0, 0), "counts")


async def test_reports_wait_for_a_router_that_is_down(
    make_router: MakeRouter, make_reporter: MakeReporter
) -> None:
    router, other = await make_router(), await make_router()
    await router.stop()
    one = make_reporter(router.url, other.url)
    say(one, "p1", "p2")
    await until(lambda: other.plans == ["p1", "p2"], "the other router's reports")
    await router.start()
    await until(lambda: router.plans == ["p1", "p2"], "reports after the router came up")


async def test_a_router_that_restarts_misses_nothing(
    make_router: MakeRouter, make_reporter: MakeReporter
) -> None:
    router = await make_router()
    one = make_reporter(router.url)
    say(one, "p1")
    await until(lambda: router.plans == ["p1"], "the first report")
    await router.stop()
    say(one, "p2")
    say(one, "p3")
    await router.start()
    await until(lambda: router.plans == ["p1", "p2", "p3"], "all reports")


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
async def test_a_batch_is_sent_again_where_the_router_may_take_it_later(
    make_router: MakeRouter, make_reporter: MakeReporter, status: int
) -> None:
    router = await make_router(statuses=[status, status])
    one = make_reporter(router.url)
    say(one, "p1")
    await until(lambda: router.plans == ["p1"], "the report")
    assert router.calls == 3
    assert router.bodies[0]["dropped"] == 0


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_batch_that_is_refused_for_good_is_lost_and_counted(
    make_router: MakeRouter, make_reporter: MakeReporter, status: int
) -> None:
    router = await make_router(statuses=[status])
    one = make_reporter(router.url)
    say(one, "p1")
    await until(lambda: one.counts().dropped == 1, "the loss")
    say(one, "p2")
    await until(lambda: router.plans == ["p2"], "the next report")
    assert router.bodies[0]["dropped"] == 1


async def test_a_router_that_never_answers_is_given_up_in_time_and_asked_again(
    make_router: MakeRouter, make_reporter: MakeReporter
) -> None:
    router = await make_router(silent=True)
    one = make_reporter(router.url, timeout_s=0.1)
    say(one, "p1")
    await until(lambda: router.calls >= 2, "a second try")
    router.silent = False
    await until(lambda: router.plans == ["p1"], "the report")
    await until(lambda: router.open == 0, "connections that stay")


async def test_the_oldest_reports_are_lost_when_too_many_wait(
    make_router: MakeRouter, make_reporter: MakeReporter
) -> None:
    router = await make_router()
    await router.stop()
    one = make_reporter(router.url, queue=3)
    for number in range(6):
        say(one, f"p{number}")
        await until(partial(arrived, one, number + 1), "a report that is neither waiting nor lost")
    await router.start()
    await until(lambda: len(router.plans) == 3, "the reports that were kept")
    assert router.plans[-2:] == ["p4", "p5"]
    assert router.bodies[-1]["dropped"] == 3


async def test_calls_return_at_once_while_no_router_answers(
    make_router: MakeRouter, make_reporter: MakeReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "MOST_SAID", 3000)
    router = await make_router(silent=True)
    one = make_reporter(router.url, interval_s=60.0)
    began_s = time.process_time()
    say(one, *(f"p{number}" for number in range(2000)))
    assert time.process_time() - began_s < 1.0
    assert one.counts().ignored_calls == 3000


async def test_closing_reports_open_requests_and_waits_for_them(
    make_router: MakeRouter, make_reporter: MakeReporter
) -> None:
    router = await make_router()
    one = make_reporter(router.url, interval_s=60.0)
    say(one, "p1")
    one.asked("r2", "p2", NEAR, 1)
    await asyncio.to_thread(one.close, 20.0)
    assert router.plans == ["p1", "p2"]
    say(one, "p3")
    assert router.plans == ["p1", "p2"]


async def test_closing_does_not_wait_for_a_router_that_is_away(
    make_router: MakeRouter, make_reporter: MakeReporter
) -> None:
    silent, away = await make_router(silent=True), await make_router()
    await away.stop()
    one = make_reporter(silent.url, away.url, timeout_s=15.0)
    say(one, "p1")
    await until(lambda: silent.calls == 1, "the call")
    began_s = time.monotonic()
    await asyncio.to_thread(one.close, 0.2)
    assert time.monotonic() - began_s < 10.0, "less than the limit of a call"
    await silent.stop()
    await until(lambda: not threads_of(silent, away), "threads that stay")


async def test_a_call_with_nonsense_costs_no_other_report(
    make_router: MakeRouter, make_reporter: MakeReporter, caplog: pytest.LogCaptureFixture
) -> None:
    router = await make_router()
    one = make_reporter(router.url)
    one.asked("r", "p", NEAR, "many")  # type: ignore[arg-type]
    say(one, "p1")
    await until(lambda: "p1" in router.plans, "the report")
    assert "malformed" in caplog.text


async def test_parts_of_one_engine_share_a_reporter_and_the_last_closes_it(make_router: MakeRouter) -> None:
    router = await make_router()
    config = ReportConfig(urls=(router.url,), interval_s=0.01)
    spec, tier = open_reports(config, BLOCK_TOKENS), open_reports(config, BLOCK_TOKENS)
    assert spec is tier
    spec.asked("r", "p", NEAR, 2)
    spec.close(5.0)
    tier.answered("r", NEAR, 2, 0, 0.5)
    tier.finished("r")
    await asyncio.to_thread(tier.close, 20.0)
    assert [report["sources"][0]["hit_blocks"] for body in router.bodies for report in body["reports"]] == [2]
    again = open_reports(config, BLOCK_TOKENS)
    assert again is not tier
    await asyncio.to_thread(again.close, 5.0)


def test_without_configuration_nothing_is_opened() -> None:
    sink = open_reports(None, BLOCK_TOKENS)
    assert isinstance(sink, NoReports)
    sink.asked("r", "p", NEAR, 2)
    sink.close(0.0)
