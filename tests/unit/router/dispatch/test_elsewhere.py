# SPDX-License-Identifier: Apache-2.0
"""Requests that a proxy sends: where else they may go, and what happens when they do."""

from __future__ import annotations

import pytest

from router.errors import NoWorkerAvailable
from router.outcomes import RoutedAttempt
from router.request import Outcome, Usage

from .conftest import BLOCK, MODEL, Desk

PROMPT = list(range(100, 100 + 200 * BLOCK + 5))


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.dispatcher.behind_proxy = True
    return desk


async def test_the_ranking_behind_the_chosen_worker_is_where_else_it_may_go(desk: Desk) -> None:
    for worker in ("a", "b", "c", "d"):
        desk.add(worker)
    desk.store("c", PROMPT)
    desk.store("b", PROMPT[: 100 * BLOCK])
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT})
    assert attempt.route.worker_id == "c"
    assert attempt.fallbacks(1) == ("b",)
    assert sorted(attempt.fallbacks(9)) == ["a", "b", "d"]
    assert attempt.fallbacks(0) == ()


async def test_a_gateway_s_own_attempts_have_no_fallbacks(desk: Desk) -> None:
    desk.dispatcher.behind_proxy = False
    for worker in ("a", "b"):
        desk.add(worker)
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT})
    assert attempt.fallbacks(9) == ()
    assert attempt.served_by("b" if attempt.route.worker_id == "a" else "a") is None


async def test_the_source_of_a_pull_and_those_that_cannot_pull_are_no_fallbacks(desk: Desk) -> None:
    for worker in ("a", "b", "c"):
        desk.add(worker, p2p=f"10.0.0.{ord(worker)}:7000")
    desk.add("stock")
    desk.store("a", PROMPT, in_ram=True)
    desk.fleet.set_drain("a", drain=True)
    desk.fleet.set_drain("stock", drain=True)
    waiting = await desk.dispatch({"model": MODEL, "prompt": PROMPT})
    desk.fleet.set_drain("a", drain=False)
    desk.fleet.set_drain("stock", drain=False)
    first = waiting.route.worker_id
    assert "remote_kv_source" in waiting.route.insert["kv_transfer_params"]
    assert waiting.fallbacks(9) == (("c",) if first == "b" else ("b",))
    # The same with all of them in the ranking: a holds everything, so it is not what is chosen only when it is busy.
    for _ in range(200):
        desk.board.promise("a", 0, 100.0, 100.0, desk.now_s)
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT})
    assert attempt.route.worker_id in {"b", "c"}
    assert {plan.worker for plan in attempt.elsewhere._decision.planned.ranking} == {"a", "b", "c", "stock"}
    assert set(attempt.fallbacks(9)) == {"b", "c"} - {attempt.route.worker_id}


async def test_a_rank_header_binds_fallbacks_to_the_same_rank(desk: Desk) -> None:
    desk.add("a", ranks=2)
    desk.add("b", ranks=2)
    desk.add("c")
    desk.store("a", PROMPT, rank=1)
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT})
    assert (attempt.record.worker, attempt.record.dp_rank) == ("a", 1)
    assert attempt.fallbacks(9) == ("b",)
    other = attempt.served_by("b")
    assert isinstance(other, RoutedAttempt)
    assert other.record.dp_rank == 1
    desk.store("c", PROMPT)
    desk.fleet.set_drain("a", drain=True)
    alone = await desk.dispatch({"model": MODEL, "prompt": PROMPT})
    assert alone.route.worker_id == "c"
    assert alone.fallbacks(9) == ()


async def test_only_allowed_workers_are_candidates_and_fallbacks(desk: Desk) -> None:
    for worker in ("a", "b", "c", "d"):
        desk.add(worker)
    desk.store("c", PROMPT)
    request = desk.request({"model": MODEL, "prompt": PROMPT})
    attempt = await desk.dispatcher.dispatch(request, frozenset(), frozenset({"a", "b"}))
    assert attempt.route.worker_id in {"a", "b"}
    assert set(attempt.fallbacks(9)) == {"a", "b"} - {attempt.route.worker_id}
    for _ in range(9):
        desk.fleet.record_outcome("d", Outcome.WORKER_ERROR, desk.now_s)
    doubtful = await desk.dispatcher.dispatch(request, frozenset(), frozenset({"d"}))
    assert doubtful.route.worker_id == "d", "better than none, as for everybody"
    with pytest.raises(NoWorkerAvailable, match="not_allowed"):
        await desk.dispatcher.dispatch(request, frozenset(), frozenset({"x"}))


async def test_load_and_record_move_to_whoever_served(desk: Desk) -> None:
    for worker in ("a", "b"):
        desk.add(worker)
    desk.store("a", PROMPT)
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT, "stream": True})
    assert (desk.board.in_flight("a"), desk.board.in_flight("b")) == (1, 0)
    assert attempt.served_by("a") is attempt
    desk.now_s += 2
    moved = attempt.served_by("b")
    assert isinstance(moved, RoutedAttempt)
    assert (desk.board.in_flight("a"), desk.board.in_flight("b")) == (0, 1)
    tokens = len(PROMPT) // BLOCK * BLOCK
    assert [desk.board.resident_tokens(worker, 0) for worker in "ab"] == [0, tokens]
    assert desk.board.queue_s("b", 0, desk.now_s) > 0
    moved.first_byte()
    moved.usage(Usage(len(PROMPT), 3, 0))
    moved.finish(Outcome.OK, 200)
    attempt.finish(Outcome.OK, 200)
    assert (desk.board.in_flight("a"), desk.board.in_flight("b")) == (0, 0)
    assert desk.board.residents.prompts == desk.board.residents.nodes == 0
    first, second = desk.log.get(attempt.request.request_id)
    assert (first.worker, first.attempt, first.observed.outcome) == ("a", 1, "worker_error")
    assert (second.worker, second.attempt, second.observed.outcome) == ("b", 2, "ok")
    assert second.observed.ttft_s == pytest.approx(2.0), "from the decision, not from the move"
    assert second.observed.cached_tokens == 0
    assert desk.trust.of("b", desk.now_s) == 1.0, "a plan that was made for another teaches nothing"
    assert moved.served_by("a") is None


async def test_a_worker_outside_of_the_ranking_takes_nothing_over(desk: Desk) -> None:
    desk.add("a")
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT})
    assert attempt.served_by("nobody") is None
    assert desk.board.in_flight("a") == 1
    attempt.finish(Outcome.CANCELLED, None)
    assert desk.board.in_flight("a") == 0


async def test_a_source_that_a_trusted_client_names_is_no_fallback() -> None:
    desk = Desk(trust_transfer_params=True)
    desk.dispatcher.behind_proxy = True
    for worker in ("a", "b", "c"):
        desk.add(worker, p2p=f"10.0.0.{ord(worker)}:7000")
    desk.store("a", PROMPT)
    theirs = {"remote_kv_source": {"remote_host": f"10.0.0.{ord('b')}", "remote_port": 7000}}
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT, "kv_transfer_params": theirs})
    assert attempt.route.worker_id == "a"
    assert attempt.fallbacks(9) == ("c",)
