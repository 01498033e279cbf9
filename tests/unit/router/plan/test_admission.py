# SPDX-License-Identifier: Apache-2.0
"""The order in which waiting requests go: shares, order, bounds, and that every ticket ends once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.plan.admission import FairQueue, Ticket

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 5.0}
_COSTS = st.floats(0.001, 100.0)


def ticket(
    tenant: str,
    cost_s: float = 1.0,
    *,
    priority: int = 0,
    pool: str = "m",
    lane: str = "",
    since_s: float = 0.0,
    wait_s: float = 30.0,
    weight: float | None = None,
) -> Ticket[str]:
    share = WEIGHTS.get(tenant, 1.0) if weight is None else weight
    return Ticket(tenant, share, priority, pool, cost_s, since_s, since_s + wait_s, "", lane)


def everything(_: Ticket[str]) -> bool:
    return True


def fill(queue: FairQueue[str], tickets: list[Ticket[str]]) -> None:
    for one in tickets:
        assert queue.enter(one) is None


def drain(queue: FairQueue[str], is_open: Callable[[Ticket[str]], bool] = everything) -> list[Ticket[str]]:
    taken = []
    while one := queue.take(is_open):
        taken.append(one)
    return taken


@given(st.dictionaries(st.sampled_from("abcd"), st.lists(_COSTS, min_size=1, max_size=30), min_size=2))
def test_shares_follow_the_weights_within_one_request_while_both_wait(costs: dict[str, list[float]]) -> None:
    queue: FairQueue[str] = FairQueue(1000)
    for tenant, own in costs.items():
        fill(queue, [ticket(tenant, cost_s) for cost_s in own])
    got: dict[str, float] = defaultdict(float)
    left = Counter({tenant: len(own) for tenant, own in costs.items()})
    while one := queue.take(everything):
        got[one.tenant] += one.cost_s
        left[one.tenant] -= 1
        for f, m in combinations(costs, 2):
            if left[f] and left[m]:
                bound = max(costs[f]) / WEIGHTS[f] + max(costs[m]) / WEIGHTS[m]
                assert abs(got[f] / WEIGHTS[f] - got[m] / WEIGHTS[m]) <= bound * (1 + 1e-9)
    assert not left.total()


def test_equal_requests_of_two_tenants_go_two_to_one() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    fill(queue, [ticket("a") for _ in range(100)])
    fill(queue, [ticket("b") for _ in range(100)])
    first = [queue.take(everything) for _ in range(90)]
    assert Counter(one.tenant for one in first if one) == {"a": 30, "b": 60}


def test_long_requests_count_for_what_they_take() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    fill(queue, [ticket("long", 10.0) for _ in range(50)])
    fill(queue, [ticket("short", 1.0) for _ in range(200)])
    first = [queue.take(everything) for _ in range(110)]
    assert Counter(one.tenant for one in first if one) == {"long": 10, "short": 100}


@given(st.integers(0, 200), st.integers(1, 5), _COSTS)
def test_whoever_comes_to_a_flood_goes_before_any_of_it_goes_twice(
    before: int, flooders: int, cost_s: float
) -> None:
    queue: FairQueue[str] = FairQueue(2000)
    for number in range(flooders):
        fill(queue, [ticket(f"flood{number}") for _ in range(300)])
    for _ in range(before):
        queue.take(everything)
    fill(queue, [ticket("late", cost_s)])
    seen: list[str] = []
    while (one := queue.take(everything)) and one.tenant != "late":
        seen.append(one.tenant)
    assert max(Counter(seen).values(), default=0) <= 1


def test_time_in_which_one_asked_for_nothing_is_not_saved_up() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    fill(queue, [ticket("x") for _ in range(200)])
    for _ in range(100):
        queue.take(everything)
    fill(queue, [ticket("y") for _ in range(100)])
    first = [queue.take(everything) for _ in range(100)]
    assert Counter(one.tenant for one in first if one) == {"x": 50, "y": 50}


def test_coming_one_by_one_gets_no_more_than_its_share() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    fill(queue, [ticket("x") for _ in range(200)])
    taken: list[str] = []
    fill(queue, [ticket("y")])
    for _ in range(100):
        one = queue.take(everything)
        assert one is not None
        taken.append(one.tenant)
        if one.tenant == "y":
            fill(queue, [ticket("y")])
    assert Counter(taken) == {"x": 50, "y": 50}


def test_higher_priority_goes_first_whatever_waits_longer() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    fill(
        queue,
        [ticket("a", priority=0), ticket("a", priority=-1), ticket("b", priority=3), ticket("a", priority=3)],
    )
    assert [one.priority for one in drain(queue)] == [3, 3, 0, -1]


def test_within_a_tenant_the_order_is_that_of_arrival() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    own = [ticket("a", cost_s) for cost_s in (5.0, 0.1, 3.0, 0.2)]
    fill(queue, own)
    fill(queue, [ticket("b") for _ in range(10)])
    assert [one for one in drain(queue) if one.tenant == "a"] == own


def test_a_head_without_room_lets_other_tenants_and_pools_pass() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    fill(queue, [ticket("a", pool="x"), ticket("a", pool="y"), ticket("b", pool="x"), ticket("c", pool="x")])
    passed = drain(queue, lambda one: one.pool == "y" or one.tenant == "b")
    assert {(one.tenant, one.pool) for one in passed} == {("a", "y"), ("b", "x")}
    assert {(one.tenant, one.pool) for one in drain(queue)} == {("a", "x"), ("c", "x")}


def test_a_ticket_that_no_worker_takes_now_lets_the_tenant_s_other_lanes_pass() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    fill(queue, [ticket("a", lane="x"), ticket("a", lane="y"), ticket("a", lane="x"), ticket("a", lane="y")])
    assert [one.number for one in drain(queue, lambda one: one.lane == "y")] == [1, 3]
    fill(queue, [ticket("a", lane="y")])
    assert [one.number for one in drain(queue)] == [0, 2, 4]


def test_a_ticket_that_left_has_cost_its_tenant_nothing() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    gone = [ticket("a", 100.0) for _ in range(10)]
    fill(queue, gone)
    fill(queue, [ticket("a") for _ in range(10)])
    fill(queue, [ticket("x", weight=1.0) for _ in range(10)])
    assert all(queue.leave(one) for one in gone)
    assert Counter(one.tenant for one in drain(queue)[:10]) == {"a": 5, "x": 5}


def test_what_a_ticket_really_costs_is_what_counts() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    fill(queue, [ticket("x", 10.0) for _ in range(40)])
    fill(queue, [ticket("y", 1.0) for _ in range(40)])
    taken = []
    for _ in range(40):
        one = queue.take(everything)
        assert one is not None
        taken.append(one.tenant)
        queue.correct(one, 1.0)
    assert Counter(taken) == {"x": 20, "y": 20}


def test_a_full_queue_sheds_the_newest_of_the_tenant_with_the_most_per_weight() -> None:
    queue: FairQueue[str] = FairQueue(6)
    flood = [ticket("a") for _ in range(6)]
    fill(queue, flood)
    extra = ticket("a")
    assert queue.enter(extra) is extra
    others = [ticket("d") for _ in range(5)]
    # Five of d, of weight 5, are as much as one of a: d pushes a's newest out, one by one, down to one of a.
    assert [queue.enter(one) for one in others] == flood[:0:-1]
    assert Counter(one.tenant for one in drain(queue)) == {"a": 1, "d": 5}


def test_of_the_tenant_that_has_too_many_the_least_urgent_goes() -> None:
    queue: FairQueue[str] = FairQueue(3)
    urgent, old, new = ticket("a", priority=5), ticket("a"), ticket("a")
    fill(queue, [old, new, urgent])
    assert queue.enter(ticket("b")) is new


def test_a_queue_for_nobody_keeps_nobody() -> None:
    queue: FairQueue[str] = FairQueue(0)
    one = ticket("a")
    assert queue.enter(one) is one
    assert not queue


def test_tickets_expire_at_their_deadline() -> None:
    queue: FairQueue[str] = FairQueue(10)
    soon, late = ticket("a", wait_s=1.0), ticket("a", wait_s=2.0)
    fill(queue, [late, soon])
    assert queue.expire(0.99) == []
    assert queue.expire(1.0) == [soon]
    assert not queue.leave(soon)
    assert drain(queue) == [late]


class Tickets(RuleBasedStateMachine):
    """Against a plain list: who is there, who may go, and that nobody goes twice."""

    CAPACITY = 8

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[str] = FairQueue(self.CAPACITY)
        self.alive: list[Ticket[str]] = []
        self.ended: list[Ticket[str]] = []
        self.now_s = 0.0

    def end(self, one: Ticket[str]) -> None:
        assert one in self.alive
        assert one not in self.ended
        self.alive.remove(one)
        self.ended.append(one)

    @rule(
        tenant=st.sampled_from("abcd"),
        priority=st.integers(-1, 1),
        pool=st.sampled_from("mn"),
        lane=st.sampled_from("xy"),
        cost_s=_COSTS,
        wait_s=st.floats(0.5, 5),
    )
    def enter(self, tenant: str, priority: int, pool: str, lane: str, cost_s: float, wait_s: float) -> None:
        one = ticket(
            tenant, cost_s, priority=priority, pool=pool, lane=lane, since_s=self.now_s, wait_s=wait_s
        )
        self.alive.append(one)
        victim = self.queue.enter(one)
        assert (victim is not None) == (len(self.alive) > self.CAPACITY)
        if victim is not None:
            burden = {t: n / WEIGHTS[t] for t, n in Counter(x.tenant for x in self.alive).items()}
            assert burden[victim.tenant] == max(burden.values())
            self.end(victim)

    @rule(closed=st.sets(st.sampled_from("mn")), closed_lanes=st.sets(st.sampled_from("xyabcd")))
    def take(self, closed: set[str], closed_lanes: set[str]) -> None:
        def is_open(one: Ticket[str]) -> bool:
            return one.pool not in closed and not {one.lane, one.tenant} & closed_lanes

        one = self.queue.take(is_open)
        able = [other for other in self.alive if is_open(other)]
        assert (one is None) == (not able)
        if one is not None:
            assert one.priority == max(other.priority for other in able)
            key = (one.tenant, one.priority, one.pool)
            assert one is next(x for x in able if (x.tenant, x.priority, x.pool) == key)
            self.end(one)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.alive))
        assert self.queue.leave(one)
        self.end(one)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def leave_again(self, data: st.DataObject) -> None:
        assert not self.queue.leave(data.draw(st.sampled_from(self.ended)))

    @rule(pause_s=st.floats(0, 3))
    def expire(self, pause_s: float) -> None:
        self.now_s += pause_s
        expired = self.queue.expire(self.now_s)
        assert set(map(id, expired)) == {id(x) for x in self.alive if x.deadline_s <= self.now_s}
        for one in expired:
            self.end(one)

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.alive) <= self.CAPACITY
        assert self.queue.cost_s == pytest.approx(sum(one.cost_s for one in self.alive))
        for tenant in WEIGHTS:
            assert self.queue.waiting(tenant) == [one for one in self.alive if one.tenant == tenant]
        assert set(self.queue.tenants()) == {one.tenant for one in self.alive}

    def teardown(self) -> None:
        for one in drain(self.queue):
            self.end(one)
        assert not self.alive
        assert not self.queue._lines
        assert not self.queue._by_tenant


TestTickets = Tickets.TestCase
