# SPDX-License-Identifier: Apache-2.0
"""What was sent to a worker counts there before its events tell of it, for as long as it may be believed."""

from __future__ import annotations

import pytest

from router.plan.decider import Decider
from router.plan.speculation import SPECULATIVE_S
from router.request import Outcome, Usage

from .conftest import BLOCK, MODEL, Desk

PROMPT = list(range(100, 100 + 500 * BLOCK))
BODY = {"model": MODEL, "prompt": PROMPT}
TURN = {"model": MODEL, "prompt": [*PROMPT, *range(20_000, 20_000 + 20 * BLOCK)]}
OTHER = {"model": MODEL, "prompt": [7, *PROMPT]}


@pytest.fixture
def pair(desk: Desk) -> Desk:
    desk.add("a")
    desk.add("b")
    return desk


async def test_requests_of_a_burst_with_one_prefix_go_where_the_first_went(pair: Desk) -> None:
    first = await pair.dispatch(BODY)
    pair.recorder.flush()
    assert (first.record.predicted_cached_tokens, first.record.speculative_tokens) == (0, 0)
    for _ in range(6):
        later = await pair.dispatch(TURN)
        pair.recorder.flush()
        assert later.record.worker == first.record.worker
        assert later.record.path_blocks["hbm"] >= 500
        assert later.record.predicted_cached_tokens >= len(PROMPT)
        assert later.record.speculative_tokens >= len(PROMPT)
    assert (await pair.dispatch(OTHER)).record.worker != first.record.worker


async def test_what_events_have_told_is_not_speculative(pair: Desk) -> None:
    first = await pair.dispatch(BODY)
    pair.store(first.record.worker, PROMPT[: 300 * BLOCK])
    later = await pair.dispatch(TURN)
    pair.recorder.flush()
    assert (later.record.path_blocks["hbm"], later.record.speculative_tokens) == (500, 200 * BLOCK)
    pair.store(first.record.worker, PROMPT)
    confirmed = await pair.dispatch(BODY)
    pair.recorder.flush()
    assert confirmed.record.speculative_tokens == 0


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.WORKER_ERROR])
async def test_a_request_that_is_over_is_no_longer_counted_on(pair: Desk, outcome: Outcome) -> None:
    first = await pair.dispatch(BODY)
    first.finish(outcome, 200)
    assert (await pair.dispatch(BODY)).record.predicted_cached_tokens == 0


async def test_after_a_while_only_events_are_believed(pair: Desk) -> None:
    await pair.dispatch(BODY)
    pair.now_s += SPECULATIVE_S
    assert (await pair.dispatcher.explain(pair.request(BODY))).predicted_cached_tokens > 0
    pair.now_s += 0.1
    assert (await pair.dispatcher.explain(pair.request(BODY))).predicted_cached_tokens == 0


async def test_a_pull_under_way_counts_only_for_those_who_wait_longer(desk: Desk) -> None:
    for worker in ("a", "b"):
        desk.add(worker, p2p=f"10.0.0.{ord(worker)}:7000")
    desk.store("a", PROMPT, in_ram=True)
    desk.fleet.set_drain("a", drain=True)
    first = (await desk.dispatch(BODY)).record
    assert (first.worker, first.source) == ("b", "a")
    # Nothing else is queued there: whoever comes now passes the one that waits for its blocks.
    assert "hbm" not in (await desk.dispatcher.explain(desk.request(BODY))).path_blocks
    desk.now_s += first.predicted_ttft_s
    assert (await desk.dispatcher.explain(desk.request(BODY))).path_blocks["hbm"] >= 499


async def test_a_worker_that_never_keeps_what_it_was_sent_is_believed_less(desk: Desk) -> None:
    desk.add("a")
    for _ in range(40):
        held = await desk.dispatch(BODY)
        asked = await desk.dispatch(BODY)
        asked.usage(Usage(prompt_tokens=len(PROMPT), completion_tokens=1, cached_tokens=0))
        asked.finish(Outcome.OK, 200)
        held.finish(Outcome.OK, 200)
        desk.now_s += 0.1
    assert desk.trust.of("a", desk.now_s) < 0.2


async def test_it_can_be_switched_off(pair: Desk) -> None:
    decider = pair.dispatcher._decider
    pair.dispatcher._decider = Decider(
        pair.holders, pair.board, decider.policy, use_peers=True, speculative_s=0.0
    )
    await pair.dispatch(BODY)
    assert (await pair.dispatch(BODY)).record.predicted_cached_tokens == 0
