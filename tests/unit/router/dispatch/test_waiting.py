# SPDX-License-Identifier: Apache-2.0
"""Requests at a dispatcher whose workers are busy: who waits, who goes next, who is refused, what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from eventually import PATIENCE_S, eventually

from router.config_tenants import AdmissionConfig
from router.errors import NoWorkerAvailable, Overloaded, ShedReason
from router.fleet.poller import PollResult, Reach
from router.gateway.routing import Attempt
from router.outcomes import RoutedAttempt
from router.plan.tenants import ANONYMOUS, Tenant
from router.request import InferenceRequest, Outcome
from router.waiting import WaitingRoom

from .conftest import BLOCK, MODEL, Desk
from .test_split import BODY, SplitDesk, fleet

PROMPT = list(range(100, 100 + 4 * BLOCK))
A, B = Tenant("a"), Tenant("b")


@dataclass
class Counter:
    """A desk with a waiting room, and one worker that has ``busy_s`` of prefill ahead."""

    settings: AdmissionConfig = field(default_factory=AdmissionConfig)
    desk: Desk = field(default_factory=Desk)
    tasks: list[asyncio.Task[Attempt]] = field(default_factory=list)

    def __post_init__(self) -> None:
        desk = self.desk
        self.room = WaitingRoom(self.settings, desk.fleet, desk.board, desk.metrics, desk.clock)
        desk.dispatcher._room = desk.dispatcher._outcomes._room = self.room
        desk.add("w")

    def busy(self, busy_s: float = 100.0, worker: str = "w") -> int:
        """Somebody else's prefill; returns its ticket on the board."""
        return self.desk.board.promise(worker, 0, busy_s, busy_s, self.desk.now_s)

    def request(self, tenant: Tenant = ANONYMOUS, **more: Any) -> InferenceRequest:
        return replace(self.desk.request({"model": MODEL, "prompt": PROMPT}), tenant=tenant, **more)

    def ask(self, tenant: Tenant = ANONYMOUS, **more: Any) -> asyncio.Task[Attempt]:
        request = self.request(tenant, **more)
        task = asyncio.create_task(self._dispatch(request))
        self.tasks.append(task)
        return task

    async def _dispatch(self, request: InferenceRequest) -> Attempt:
        async with asyncio.timeout(PATIENCE_S):
            return await self.desk.dispatcher.dispatch(request, frozenset())

    async def asked(self, tenant: Tenant = ANONYMOUS, **more: Any) -> asyncio.Task[Attempt]:
        """A request that is known to wait."""
        before = self.waiting
        task = self.ask(tenant, **more)
        await until(lambda: self.waiting == before + 1 or task.done(), "a request that does not wait")
        assert not task.done()
        return task

    @property
    def waiting(self) -> int:
        return int(self.room.view()["waiting"])

    @property
    def in_flight(self) -> int:
        return self.desk.board.in_flight("w")


async def until(holds: Callable[[], bool], what: str) -> None:
    async def look() -> bool:
        return holds()

    await eventually(look, what)


def note_the_end(task: asyncio.Task[Attempt], name: str, order: list[str]) -> None:
    task.add_done_callback(lambda _: order.append(name))


def routed(attempt: Attempt) -> RoutedAttempt:
    assert isinstance(attempt, RoutedAttempt)
    return attempt


async def test_nothing_waits_while_one_candidate_has_room() -> None:
    counter = Counter()
    counter.desk.add("idle")
    counter.busy()
    attempt = await counter.ask()
    assert attempt.route.worker_id == "idle"
    assert routed(attempt).record.waited_s == 0.0
    assert counter.desk.count("pointsman_wait_seconds_count") == 0


async def test_a_request_waits_until_load_ends_and_its_record_says_how_long() -> None:
    counter = Counter()
    ticket = counter.busy()
    task = await counter.asked(A)
    assert counter.desk.count("pointsman_waiting_requests", tenant="a") == 1
    counter.desk.now_s += 2.0
    counter.desk.board.release(ticket, counter.desk.now_s)
    counter.room.freed("w")
    attempt = routed(await task)
    assert attempt.record.waited_s == 2.0
    assert attempt.record.tenant == "a"
    assert counter.desk.count("pointsman_waiting_requests", tenant="a") == 0
    assert counter.desk.count("pointsman_wait_seconds_sum") == 2.0


async def test_a_queue_that_shrinks_as_time_passes_lets_through_without_any_event() -> None:
    counter = Counter()
    counter.busy(13.0)
    task = await counter.asked()
    counter.desk.now_s += 2.9
    counter.room._let_through()
    assert not task.done()
    counter.desk.now_s += 0.2
    assert routed(await task).record.waited_s == pytest.approx(3.1)


async def test_the_end_and_the_first_byte_of_an_attempt_let_the_next_one_through() -> None:
    counter = Counter(AdmissionConfig(max_in_flight_per_worker=1))
    attempt = await counter.ask()
    task = await counter.asked()
    attempt.finish(Outcome.OK, 200)
    second = await task
    assert counter.in_flight == 1
    second.finish(Outcome.OK, 200)

    counter = Counter(AdmissionConfig(max_queue_s=0.001))
    body = {"model": MODEL, "prompt": PROMPT * 50, "stream": True}
    streamed = await counter.desk.dispatch(body)
    task = await counter.asked()
    streamed.first_byte()
    await task


async def test_each_that_is_let_through_counts_before_the_next_is_considered() -> None:
    counter = Counter(AdmissionConfig(max_queue_s=0.001))
    ticket = counter.busy()
    tasks = [await counter.asked() for _ in range(5)]
    counter.desk.board.release(ticket, counter.desk.now_s)
    counter.room.freed("w")
    first = await tasks[0]
    # Its own prefill fills the worker again.
    assert [task.done() for task in tasks] == [True, False, False, False, False]
    first.finish(Outcome.OK, 200)
    await tasks[1]
    assert [task.done() for task in tasks] == [True, True, False, False, False]
    for task in tasks[2:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_whoever_comes_later_does_not_overtake_and_the_urgent_does() -> None:
    counter = Counter(AdmissionConfig(max_in_flight_per_worker=1))
    order: list[str] = []
    running = await counter.ask()
    for name in ("first", "second", "urgent"):
        task = await counter.asked(priority=1 if name == "urgent" else 0)
        note_the_end(task, name, order)
    for task in (counter.tasks[3], counter.tasks[1], counter.tasks[2]):
        running.finish(Outcome.OK, 200)
        running = await task
    assert order == ["urgent", "first", "second"]


async def test_tenants_take_turns_whatever_the_order_of_arrival() -> None:
    counter = Counter(AdmissionConfig(max_in_flight_per_worker=1))
    order: list[str] = []
    running = await counter.ask()
    for tenant in (A, A, A, A, B, B):
        task = await counter.asked(tenant)
        note_the_end(task, tenant.name, order)
    pending = set(counter.tasks[1:])
    while pending:
        running.finish(Outcome.OK, 200)
        [done], pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        running = done.result()
    assert order == ["a", "b", "a", "b", "a", "a"]


async def test_a_request_that_waited_too_long_is_refused_with_a_time_to_come_back() -> None:
    counter = Counter(AdmissionConfig(max_wait_s=5.0))
    counter.busy(30.5)
    task = await counter.asked(A)
    counter.desk.now_s += 5.0
    with pytest.raises(Overloaded) as refused:
        await task
    # 20.5 s over the limit when it came, and nothing else waits.
    assert (refused.value.reason, refused.value.retry_after_s) == (ShedReason.TIMEOUT, 21)
    assert counter.desk.count("pointsman_shed_total", tenant="a", reason="timeout") == 1
    assert counter.waiting == 0


async def test_one_too_many_pushes_out_the_newest_of_whoever_has_the_most() -> None:
    counter = Counter(AdmissionConfig(max_waiting=2))
    counter.busy()
    first, second = await counter.asked(A), await counter.asked(A)
    other = counter.ask(B)
    with pytest.raises(Overloaded) as refused:
        await second
    assert refused.value.reason is ShedReason.FULL
    assert counter.desk.count("pointsman_shed_total", tenant="a", reason="full") == 1
    with pytest.raises(Overloaded):
        await counter.ask(A)
    assert not first.done()
    assert not other.done()
    first.cancel()
    other.cancel()
    await asyncio.gather(first, other, return_exceptions=True)
    assert counter.waiting == 0


async def test_a_client_that_goes_while_it_waits_leaves_nothing() -> None:
    counter = Counter()
    ticket = counter.busy()
    gone, stays = await counter.asked(A), await counter.asked(A)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert counter.waiting == 1
    counter.desk.board.release(ticket, counter.desk.now_s)
    counter.room.freed("w")
    (await stays).finish(Outcome.OK, 200)
    assert counter.in_flight == 0
    assert counter.room.view()["tenants"] == []
    assert counter.desk.count("pointsman_waiting_requests", tenant="a") == 0


async def test_a_client_that_goes_as_its_attempt_begins_ends_that_attempt() -> None:
    counter = Counter()
    ticket = counter.busy()
    task = await counter.asked(A)
    counter.desk.board.release(ticket, counter.desk.now_s)
    counter.room._let_through()
    assert counter.in_flight == 1  # promised, and the task has not run since
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert counter.in_flight == 0
    assert counter.room.view()["tenants"] == []
    assert counter.desk.count("pointsman_attempts_total", worker="w", outcome="client_gone") == 1


async def test_a_client_that_goes_before_its_turn_does_not_take_it() -> None:
    counter = Counter()
    ticket = counter.busy()
    gone, stays = await counter.asked(A), await counter.asked(A)
    counter.desk.board.release(ticket, counter.desk.now_s)
    gone.cancel()
    counter.room._let_through()
    await stays
    assert counter.in_flight == 1
    assert len(counter.desk.log) == 1
    await asyncio.gather(gone, return_exceptions=True)


async def test_a_tenant_at_its_own_limit_waits_and_holds_up_nobody() -> None:
    counter = Counter()
    narrow = Tenant("narrow", max_in_flight=1)
    running = await counter.ask(narrow)
    held = await counter.asked(narrow)
    other = await counter.ask(B)
    assert not held.done()
    running.finish(Outcome.OK, 200)
    (await held).finish(Outcome.OK, 200)
    other.finish(Outcome.OK, 200)


async def test_a_full_worker_is_no_candidate_while_another_has_room() -> None:
    counter = Counter(AdmissionConfig(max_in_flight_per_worker=1))
    counter.desk.add("x")
    counter.desk.store("w", PROMPT)
    first, second = await counter.ask(), await counter.ask()
    assert {first.route.worker_id, second.route.worker_id} == {"w", "x"}
    task = await counter.asked()
    second.finish(Outcome.OK, 200)
    await task


async def test_a_retry_was_let_in_before_and_does_not_wait_again() -> None:
    counter = Counter(AdmissionConfig(max_in_flight_per_worker=1))
    counter.desk.add("x")
    counter.busy(worker="w")
    counter.busy(worker="x")
    attempt = await counter.desk.dispatcher.dispatch(counter.request(), frozenset({"x"}))
    assert attempt.route.worker_id == "w"


async def test_a_fleet_that_dies_answers_those_that_wait() -> None:
    counter = Counter()
    counter.busy()
    task = await counter.asked()
    member = counter.desk.fleet._members["w"]
    counter.desk.fleet._apply(member, PollResult(Reach.REFUSED, "refused", None, None), counter.desk.now_s)
    with pytest.raises(NoWorkerAvailable):
        await task
    assert counter.waiting == 0


async def test_other_models_are_not_held_up() -> None:
    counter = Counter()
    counter.busy()
    counter.desk.fleet.get("w").models.pop("lora")  # type: ignore[union-attr]
    counter.desk.add("x")
    counter.desk.fleet.get("x").models.pop(MODEL)  # type: ignore[union-attr]
    held = await counter.asked()
    request = counter.desk.request({"model": "lora", "prompt": PROMPT})
    attempt = await counter._dispatch(request)
    assert attempt.route.worker_id == "x"
    assert not held.done()
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)


@pytest.mark.parametrize("shed", [False, True])
async def test_a_first_token_that_cannot_be_in_time_is_refused_at_once_only_where_wanted(shed: bool) -> None:
    counter = Counter(AdmissionConfig(shed_on_slo=shed))
    counter.busy(9.0)  # below the limit: nobody would wait
    if not shed:
        await counter.ask(slo_ttft_s=5.0)
        return
    with pytest.raises(Overloaded) as refused:
        await counter.ask(slo_ttft_s=5.0)
    assert (refused.value.reason, refused.value.retry_after_s) == (ShedReason.SLO, 9)
    await counter.ask(slo_ttft_s=20.0)
    await counter.ask()


async def test_waiting_counts_against_the_time_to_first_token() -> None:
    counter = Counter(AdmissionConfig(shed_on_slo=True, max_in_flight_per_worker=1))
    running = await counter.ask()
    late, later = await counter.asked(slo_ttft_s=4.0), await counter.asked(slo_ttft_s=4.0)
    counter.desk.now_s += 3.999
    running.finish(Outcome.OK, 200)
    with pytest.raises(Overloaded) as refused:
        await late
    assert refused.value.reason is ShedReason.SLO
    counter.desk.now_s += 0.001
    with pytest.raises(Overloaded) as refused:
        await later
    assert refused.value.reason is ShedReason.SLO
    assert counter.in_flight == 0


async def test_the_view_tells_who_waits_and_for_how_long() -> None:
    counter = Counter(AdmissionConfig(max_in_flight_per_worker=1))
    await counter.ask(B)
    first = await counter.asked(A)
    counter.desk.now_s += 1.5
    second = await counter.asked(A)
    view = counter.room.view()
    assert (view["waiting"], view["max_waiting"]) == (2, 1000)
    [a, b] = view["tenants"]
    assert (a["tenant"], a["waiting"], a["oldest_wait_s"], a["in_flight"]) == ("a", 2, 1.5, 0)
    assert a["waiting_prefill_s"] > 0
    assert (b["tenant"], b["waiting"], b["oldest_wait_s"], b["in_flight"]) == ("b", 0, None, 1)
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)


async def test_both_legs_of_a_split_request_carry_the_tenant_s_salt() -> None:
    desk = SplitDesk()
    fleet(desk)
    salted = replace(desk.request(BODY), tenant=Tenant("a", salt_key=bytes(16)), cache_salt="salt-of-a")
    attempt = await desk.dispatcher.dispatch(salted, frozenset())
    leg = attempt.route.prefill
    assert leg is not None
    assert [insert["cache_salt"] for insert in (attempt.route.insert, leg.insert)] == ["salt-of-a"] * 2
