# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

from engine_ext.sim.output import SimCounters, SimMetrics
from router.plan.peers import Gauges
from router.replay.traces import TraceRequest
from router.replay.view import POLL_INTERVAL_S, SPECULATION_S, VirtualView


@dataclass
class Clock:
    now_s: float = 0.0


def viewed() -> tuple[Clock, VirtualView]:
    clock = Clock()
    return clock, VirtualView(lambda: clock.now_s)


def metrics(waiting: int, usage: float) -> SimMetrics:
    return SimMetrics(1, waiting, usage, 0, 0, False, SimCounters())


def test_a_router_that_polls_sees_gauges_as_of_its_last_poll() -> None:
    clock, view = viewed()
    assert view.gauges("a") == Gauges(0, 0.0)
    view.step_ended("a", metrics(5, 0.5))
    clock.now_s = POLL_INTERVAL_S * 0.9
    assert view.gauges("a") == Gauges(0, 0.0)
    clock.now_s = POLL_INTERVAL_S
    assert view.gauges("a") == Gauges(5, 0.5)
    assert view.gauges("b") == Gauges(0, 0.0)


def test_gauges_stay_what_the_engine_last_set_however_often_they_are_polled() -> None:
    clock, view = viewed()
    view.step_ended("a", metrics(5, 0.5))
    clock.now_s = 100.0
    assert view.gauges("a") == Gauges(5, 0.5)


def request(*blocks: int, partial: bool = False) -> TraceRequest:
    tokens = len(blocks) * 64 - (10 if partial else 0)
    return TraceRequest(0.0, tokens, 1, blocks, 64, 0)


def in_use(view: VirtualView, worker: str, asked: TraceRequest) -> int:
    view.asked(asked)
    return view.tokens_in_use(worker)


def test_a_block_in_use_counts_once_whoever_shares_it() -> None:
    _, view = viewed()
    first, second = request(1, 2, 3), request(1, 2, 4)
    view.begun("a", first)
    assert in_use(view, "a", second) == 4 * 64
    assert in_use(view, "b", second) == 3 * 64
    view.begun("a", second)
    assert in_use(view, "a", request(9)) == 5 * 64
    view.ended("a", first)
    assert in_use(view, "a", request(9)) == 4 * 64
    view.ended("a", second)
    assert in_use(view, "a", request(9)) == 64


def test_a_partial_block_is_nobodys() -> None:
    _, view = viewed()
    view.begun("a", request(1, 2, partial=True))
    assert in_use(view, "a", request(7, 8, partial=True)) == 2 * 64
    view.asked(request(1, 2))
    assert view.tokens_sent_lately("a") == 64


def test_what_was_sent_is_believed_to_be_held_for_a_while_from_its_beginning_on() -> None:
    clock, view = viewed()
    view.begun("a", request(1, 2, 3))
    view.asked(request(1, 2, 9, 3))
    clock.now_s = 0.9 * SPECULATION_S
    assert view.tokens_sent_lately("a") == 2 * 64
    assert view.tokens_sent_lately("b") == 0
    view.begun("a", request(1))
    clock.now_s = SPECULATION_S
    assert view.tokens_sent_lately("a") == 64, "only what was sent again since"
