# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from router.replay.arrivals import ClosedLoop, TraceArrivals
from router.replay.traces import TraceRequest


def request(arrival_s: float, index: int = 0, output_tokens: int = 1) -> TraceRequest:
    return TraceRequest(arrival_s, 64, output_tokens, (index,), 64, index)


def conversation(*output_tokens: int) -> list[TraceRequest]:
    """Turns that can be told apart by the length of their answers."""
    return [request(99.0, 7, tokens) for tokens in output_tokens]


def test_a_trace_is_sent_in_order_of_arrival_whatever_is_answered() -> None:
    arrivals = TraceArrivals([request(2.0, 0), request(1.0, 1)])
    assert arrivals.next_s == 1.0
    assert arrivals.take().index == 1
    arrivals.finished(1, 50.0)
    assert arrivals.next_s == 2.0
    assert arrivals.take().index == 0
    assert arrivals.next_s is None


def test_a_conversation_asks_again_when_it_is_answered_and_not_before() -> None:
    loop = ClosedLoop([conversation(1, 2)], concurrent=1)
    first = loop.take()
    assert (first.arrival_s, first.output_tokens) == (0.0, 1)
    assert loop.next_s is None
    loop.finished(first.index, 3.5)
    assert loop.next_s == 3.5
    second = loop.take()
    assert (second.arrival_s, second.output_tokens) == (3.5, 2)
    assert second.index != first.index
    loop.finished(second.index, 4.0)
    assert loop.next_s is None


def test_only_so_many_conversations_run_at_a_time_and_one_that_ends_makes_room() -> None:
    loop = ClosedLoop([conversation(number) for number in (1, 2, 3)], concurrent=2)
    taken = [loop.take(), loop.take()]
    assert [one.output_tokens for one in taken] == [1, 2]
    assert loop.next_s is None
    loop.finished(taken[1].index, 6.0)
    third = loop.take()
    assert (third.arrival_s, third.output_tokens) == (6.0, 3)
    loop.finished(taken[0].index, 7.0)
    loop.finished(third.index, 8.0)
    assert loop.next_s is None


def test_first_conversations_begin_apart() -> None:
    loop = ClosedLoop([conversation(number) for number in (1, 2, 3)], concurrent=3, apart_s=0.5)
    assert [loop.take().arrival_s for _ in range(3)] == [0.0, 0.5, 1.0]
