# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.plan.load import LoadBoard


def test_promise_counts_from_the_decision_until_the_first_token() -> None:
    board = LoadBoard()
    ticket = board.promise("a", 0, 0.5, 0.5, 10.0)
    assert board.queue_s("a", 0, 10.0) == pytest.approx(0.5)
    assert (board.in_flight("a"), board.decodes("a", 0, 10.0)) == (1, 0)
    board.first_token(ticket, 10.4)
    assert board.queue_s("a", 0, 10.4) == 0.0
    assert (board.in_flight("a"), board.decodes("a", 0, 10.4)) == (1, 1)
    board.release(ticket, 12.0)
    assert (board.in_flight("a"), board.decodes("a", 0, 12.0)) == (0, 0)


def test_overdue_head_stops_the_progress_of_those_behind_it() -> None:
    board = LoadBoard()
    board.promise("a", 0, 1.0, 1.0, 0.0)
    board.promise("a", 0, 1.0, 2.0, 0.0)
    assert board.queue_s("a", 0, 0.4) == pytest.approx(1.6)
    assert board.queue_s("a", 0, 9.0) == pytest.approx(1.0)


def test_work_behind_a_loading_head_goes_on_until_the_head_is_overdue() -> None:
    board = LoadBoard()
    board.promise("a", 0, 0.02, 0.5, 0.0, ["s"])
    board.promise("a", 0, 1.0, 1.0, 0.0)
    assert board.queue_s("a", 0, 0.4) == pytest.approx(0.62)
    assert board.queue_s("a", 0, 5.0) == pytest.approx(0.52)


def test_work_whose_first_token_is_not_seen_ends_with_its_time() -> None:
    board = LoadBoard()
    ticket = board.promise("a", 0, 1.0, 1.0, 0.0, observable=False)
    assert board.queue_s("a", 0, 0.25) == pytest.approx(0.75)
    assert board.queue_s("a", 0, 5.0) == 0.0
    board.release(ticket, 9.0)
    assert board.queue_s("a", 0, 9.0) == 0.0


def test_release_counts_once() -> None:
    board = LoadBoard()
    first, second = board.promise("a", 0, 1.0, 1.0, 0.0, ["s"]), board.promise("a", 0, 1.0, 1.0, 0.0, ["s"])
    board.release(first, 1.0)
    board.release(first, 1.0)
    board.first_token(first, 1.0)
    assert (board.in_flight("a"), board.pulls("s")) == (1, 1)
    board.release(second, 1.0)
    assert (board.in_flight("a"), board.pulls("s")) == (0, 0)


def test_pull_burdens_both_links_until_the_first_token() -> None:
    board = LoadBoard()
    ticket = board.promise("a", 0, 1.0, 1.0, 0.0, ["s"])
    assert (board.pulls("s"), board.pulls("a")) == (1, 1)
    board.first_token(ticket, 1.0)
    assert (board.pulls("s"), board.pulls("a")) == (0, 0)


def test_session_is_paid_for_once_and_forgotten_with_its_worker() -> None:
    board = LoadBoard()
    board.promise("a", 0, 1.0, 1.0, 0.0, ["s"])
    assert board.sessions("a") == {"s"}
    board.forget("s")
    assert board.sessions("a") == set()


def test_requests_of_others_are_known_from_samples_that_age_out() -> None:
    board = LoadBoard()
    board.promise("a", 0, 0.5, 0.5, 0.0)
    board.sampled("b", running=3, waiting=2, now_s=0.0)
    assert board.decodes("b", 0, 1.0) == 3
    assert board.queue_s("b", 0, 1.0) > 0.0
    assert (board.decodes("b", 0, 60.0), board.queue_s("b", 0, 60.0)) == (0, 0.0)


def test_own_requests_in_a_sample_do_not_count_twice() -> None:
    board = LoadBoard()
    board.first_token(board.promise("a", 0, 0.5, 0.5, 0.0), 0.1)
    board.sampled("a", running=1, waiting=0, now_s=0.2)
    assert board.decodes("a", 0, 0.3) == 1


def test_sample_of_a_busy_moment_that_has_passed_shows_no_phantom_load() -> None:
    board = LoadBoard()
    tickets = [board.promise("a", 0, 0.5, 0.5, 0.0) for _ in range(5)]
    for ticket in tickets:
        board.release(ticket, 0.5)
    board.sampled("a", running=4, waiting=1, now_s=0.6)
    assert (board.decodes("a", 0, 0.7), board.queue_s("a", 0, 0.7)) == (0, 0.0)
    board.sampled("a", running=4, waiting=1, now_s=1.6)
    assert board.decodes("a", 0, 1.7) == 4


@given(st.lists(st.tuples(st.sampled_from("prf"), st.integers(0, 9), st.booleans()), max_size=60))
def test_board_is_empty_when_everything_is_released(steps: list[tuple[str, int, bool]]) -> None:
    board, tickets, now_s = LoadBoard(), list[int](), 0.0
    for kind, number, observable in steps:
        now_s += 0.1
        if kind == "p" or not tickets:
            tickets.append(board.promise("ab"[number % 2], 0, 0.3, 0.4, now_s, ["s"], observable=observable))
        elif kind == "f":
            board.first_token(tickets[number % len(tickets)], now_s)
        else:
            board.release(tickets[number % len(tickets)], now_s)
        assert board.queue_s("a", 0, now_s) >= 0.0
    for ticket in tickets:
        board.release(ticket, now_s)
    for worker in "ab":
        assert (
            board.in_flight(worker),
            board.decodes(worker, 0, now_s),
            board.queue_s(worker, 0, now_s),
        ) == (0, 0, 0.0)
    assert board.pulls("s") == 0


def test_each_of_several_sources_counts_for_its_share_until_the_first_token() -> None:
    board = LoadBoard()
    whole = board.promise("w", 0, 1.0, 1.0, 0.0, ["a"])
    halves = board.promise("w", 0, 1.0, 1.0, 0.0, ["a", "b"])
    board.promise("w", 0, 1.0, 1.0, 0.0, ["a", "b", "c"])
    assert [board.pulls(name) for name in "abcw"] == pytest.approx([1 + 1 / 2 + 1 / 3, 5 / 6, 1 / 3, 3])
    assert board.sessions("w") == {"a", "b", "c"}
    board.first_token(halves, 1.0)
    board.release(halves, 2.0)
    board.release(whole, 2.0)
    assert [board.pulls(name) for name in "abcw"] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    with pytest.raises(ValueError, match="3 workers"):
        board.promise("w", 0, 1.0, 1.0, 0.0, ["a", "b", "c", "d"])


def test_sessions_that_were_read_do_not_change_with_the_next_promise() -> None:
    board = LoadBoard()
    before = board.sessions("a")
    board.promise("a", 0, 1.0, 1.0, 0.0, ["b"])
    read = board.sessions("a")
    board.promise("a", 0, 1.0, 1.0, 0.0, ["c"])
    assert (before, read, board.sessions("a")) == (set(), {"b"}, {"b", "c"})
