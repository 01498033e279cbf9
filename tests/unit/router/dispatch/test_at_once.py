# SPDX-License-Identifier: Apache-2.0
"""Attempts that are begun without a task of their own, and those that cannot be."""

from __future__ import annotations

from router.outcomes import RoutedAttempt
from router.request import Outcome

from .conftest import BLOCK, MODEL, Desk
from .test_waiting import Counter

PROMPT = list(range(100, 100 + 4 * BLOCK))


async def test_a_prompt_of_token_ids_is_routed_at_once_as_it_is_when_waited_for(desk: Desk) -> None:
    desk.add("a")
    desk.add("b")
    desk.store("b", PROMPT)
    body = {"model": MODEL, "prompt": PROMPT}
    now = desk.dispatcher.dispatch_now(desk.request(body), frozenset())
    assert isinstance(now, RoutedAttempt)
    assert desk.board.in_flight("b") == 1
    now.finish(Outcome.OK, 200)
    assert desk.board.in_flight("b") == 0
    waited = await desk.dispatch(body)
    assert now.route.worker_id == waited.route.worker_id == "b"
    assert now.record.prompt_tokens == waited.record.prompt_tokens == len(PROMPT)


async def test_what_must_be_tokenised_elsewhere_is_left_for_later(desk: Desk) -> None:
    desk.add("a")
    request = desk.request({"model": MODEL, "prompt": "a text, and no tokenizer here"})
    assert desk.dispatcher.dispatch_now(request, frozenset()) is None
    assert desk.board.in_flight("a") == 0
    assert desk.count("pointsman_decisions_total", policy="kv_aware") == 0


async def test_whoever_must_wait_its_turn_is_left_for_later() -> None:
    counter = Counter()
    ticket = counter.busy()
    dispatch_now = counter.desk.dispatcher.dispatch_now
    assert dispatch_now(counter.request(), frozenset()) is None
    counter.desk.board.release(ticket, counter.desk.now_s)
    assert dispatch_now(counter.request(), frozenset()) is not None
