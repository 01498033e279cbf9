# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.breaker import Breaker, BreakerState
from router.request import Outcome

ERROR = Outcome.WORKER_ERROR


@pytest.fixture
def breaker():
    return Breaker(failure_threshold=3, backoff_min_s=1.0, backoff_max_s=30.0)


def fail(breaker, now_s, times=3):
    for _ in range(times):
        breaker.record(ERROR, now_s)


def test_errors_in_a_row_open_it_for_the_shortest_pause(breaker):
    fail(breaker, 10.0, times=2)
    assert breaker.admit(10.0)
    breaker.record(ERROR, 10.0)
    assert not breaker.admit(10.9)
    assert breaker.state(11.0) is BreakerState.HALF_OPEN


def test_a_served_request_between_errors_keeps_it_closed(breaker):
    for _ in range(10):
        fail(breaker, 0.0, times=2)
        breaker.record(Outcome.OK, 0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_ERROR, Outcome.BUSY, Outcome.CLIENT_GONE])
def test_what_is_not_the_workers_fault_never_opens_it(breaker, outcome):
    for _ in range(100):
        breaker.record(outcome, 0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    assert breaker.consecutive_failures == 0


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_ERROR, Outcome.BUSY, Outcome.CLIENT_GONE])
def test_what_is_not_served_does_not_heal(breaker, outcome):
    fail(breaker, 0.0)
    breaker.record(outcome, 0.1)
    assert not breaker.admit(0.5)


def test_half_open_lets_one_request_through_until_it_is_reported(breaker):
    fail(breaker, 0.0)
    assert [breaker.admit(1.0) for _ in range(5)] == [True, False, False, False, False]
    breaker.record(Outcome.OK, 1.5)
    assert breaker.admit(1.5)


def test_an_offer_nobody_reports_on_lapses(breaker):
    fail(breaker, 0.0)
    assert breaker.admit(1.0)
    assert not breaker.admit(1.9)
    assert breaker.admit(2.0)


def test_failed_trials_double_the_pause_up_to_the_limit(breaker):
    fail(breaker, 0.0)
    now_s, pauses = 0.0, []
    for _ in range(8):
        pauses.append(breaker.pause_s)
        now_s = breaker.retry_at_s
        assert breaker.admit(now_s)
        breaker.record(ERROR, now_s)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_requests_under_way_when_it_opens_do_not_lengthen_the_pause(breaker):
    fail(breaker, 0.0, times=40)
    assert breaker.pause_s == 1.0
    assert breaker.retry_at_s == 1.0


@given(st.lists(st.tuples(st.sampled_from(Outcome), st.floats(0, 5), st.booleans()), max_size=60))
def test_pause_stays_within_its_limits_and_always_ends(steps):
    breaker, now_s = Breaker(3, 1.0, 30.0), 0.0
    for outcome, passed_s, asked in steps:
        now_s += passed_s
        if asked:
            breaker.admit(now_s)
        breaker.record(outcome, now_s)
        assert 0 <= breaker.pause_s <= 30.0
        assert breaker.retry_at_s <= now_s + 30.0
    assert breaker.admit(now_s + 31.0)
