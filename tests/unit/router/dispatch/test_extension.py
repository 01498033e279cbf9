# SPDX-License-Identifier: Apache-2.0
"""Requests for workers that run our engine extension."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine_ext.vllm.plan import Plan, read_plan
from router.elsewhere import takes_the_same
from router.gateway.routing import Attempt
from router.outcomes import RoutedAttempt
from router.plan.tails import LEAST_REQUESTS, TailReuse
from router.plan.tenants import Tenant
from router.request import Outcome, Usage

from .conftest import BLOCK, MODEL, Desk

BLOCKS = 500
PROMPT = list(range(1, BLOCKS * BLOCK + 1))
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "stream": True}


def fleet_of_three(desk: Desk, *, held: int = BLOCKS) -> None:
    """Two busy holders of a prompt and an idle worker, all with our extension."""
    for name in ("a", "b", "w"):
        desk.add(name, extension=f"{name}:5720")
    desk.store("a", PROMPT[: held * BLOCK], in_ram=True)
    desk.store("b", PROMPT, in_ram=True)
    for name in ("a", "b"):
        desk.board.promise(name, 0, 60.0, 60.0, desk.now_s)
        for number in range(3):
            # They serve pulls of others.
            desk.board.promise(f"other{number}", 0, 1.0, 1.0, desk.now_s, [name])


def params_of(attempt: RoutedAttempt) -> dict[str, Any]:
    params = attempt.route.insert["kv_transfer_params"]
    assert isinstance(params, dict)
    return params


def plan_of(attempt: Attempt) -> Plan:
    assert isinstance(attempt, RoutedAttempt)
    read = read_plan(params_of(attempt))
    assert read is not None
    return read


async def test_a_prompt_held_by_two_busy_peers_is_taken_from_both(desk: Desk) -> None:
    fleet_of_three(desk)
    attempt = await desk.dispatch(BODY)
    plan = plan_of(attempt)
    assert attempt.record.worker == "w"
    assert [(one.source, one.start_token, one.end_token) for one in plan.pulls] == [
        ("a:5720", 0, 4000),
        ("b:5720", 4000, 8000),
    ]
    assert plan.plan_id == attempt.record.plan_id
    assert params_of(attempt).keys() == {"pointsman"}
    assert dict(attempt.route.response_headers)[b"x-pointsman-path"] == b"peer:500"
    # All links are taken from now on, those of the sources by half a pull each, and given back once.
    assert [desk.board.pulls(name) for name in "abw"] == [3.5, 3.5, 1]
    attempt.first_byte()
    assert [desk.board.pulls(name) for name in "abw"] == [3, 3, 0]
    attempt.finish(Outcome.OK, 200)
    attempt.finish(Outcome.OK, 200)
    assert [desk.board.pulls(name) for name in "abw"] == [3, 3, 0]


async def test_the_record_says_what_was_to_come_from_whom(desk: Desk) -> None:
    fleet_of_three(desk)
    record = (await desk.dispatch(BODY)).record
    assert [(one.source, one.kind, one.start_token, one.end_token, one.blocks) for one in record.pulls] == [
        ("a", "pointsman", 0, 4000, 250),
        ("b", "pointsman", 4000, 8000, 250),
    ]
    assert record.source == "a"
    assert "from a and b" in record.reason
    assert record.candidates[0].pulls == record.pulls
    assert record.path_blocks == {"peer": BLOCKS}
    explained = await desk.dispatcher.explain(desk.request(BODY))
    assert len(explained.pulls) == 2


async def test_every_attempt_has_a_plan_id_of_its_own(desk: Desk) -> None:
    fleet_of_three(desk)
    first, second = await desk.dispatch(BODY), await desk.dispatch(BODY, tried=frozenset({"b"}))
    assert plan_of(first).plan_id != plan_of(second).plan_id


async def test_several_sequences_are_told_of_no_source(desk: Desk) -> None:
    fleet_of_three(desk)
    attempt = await desk.dispatch({**BODY, "n": 2})
    assert attempt.record.worker == "w"
    assert plan_of(attempt).pulls == ()


async def test_a_worker_is_told_the_worth_of_what_it_holds(desk: Desk) -> None:
    fleet_of_three(desk)
    evict = plan_of(await desk.dispatch(BODY)).evict
    computed_s = desk.calibration.model_for("w").prefill_s(0, len(PROMPT), 0)
    assert evict.rebuild_s == pytest.approx(computed_s)
    assert (evict.peer_copies, evict.pinned_tokens, evict.private_from_token) == (2, 0, None)


async def test_it_is_told_also_where_nothing_is_pulled(desk: Desk) -> None:
    desk.add("alone", extension="alone:5720")
    plan = plan_of(await desk.dispatch(BODY))
    assert (plan.pulls, plan.evict.peer_copies) == ((), 0)
    assert plan.evict.rebuild_s is not None


async def test_stock_workers_are_told_nothing_of_it(desk: Desk) -> None:
    desk.add("stock", p2p="stock:5710")
    assert "kv_transfer_params" not in (await desk.dispatch(BODY)).route.insert


async def test_beginnings_that_many_share_are_pinned_and_tails_are_private() -> None:
    desk = Desk(tails=TailReuse(), limit_offload=False)
    desk.add("a", extension="a:5720")
    shared = PROMPT[: 10 * BLOCK]
    desk.store("a", shared, in_ram=True)
    seen = []
    for number in range(LEAST_REQUESTS + 60):
        tail = [100_000 + number * BLOCK + i for i in range(2 * BLOCK)]
        attempt = await desk.dispatch({"model": MODEL, "prompt": shared + tail})
        evict = plan_of(attempt).evict
        seen.append((evict.pinned_tokens, evict.private_from_token))
        attempt.usage(Usage(prompt_tokens=12 * BLOCK, completion_tokens=4, cached_tokens=10 * BLOCK))
        attempt.finish(Outcome.OK, 200)
        assert params_of(attempt).keys() == {"pointsman"}
    assert seen[0] == (0, None)
    # A few tails are left as they are, so that a change is seen.
    assert set(seen[-50:]) <= {(160, 160), (160, None)}
    assert seen[-50:].count((160, 160)) > 35


@pytest.mark.parametrize(("salted", "tenant"), [(True, "blue"), (False, "")])
async def test_tenants_that_share_are_one_to_the_engines(desk: Desk, salted: bool, tenant: str) -> None:
    desk.add("w", extension="w:5720")
    request = replace(desk.request(BODY), tenant=Tenant("blue", salt_key=b"k" * 16 if salted else None))
    attempt = await desk.dispatcher.dispatch(request, frozenset())
    assert plan_of(attempt).tenant == tenant


async def test_a_first_token_after_pulls_from_several_teaches_nothing_of_one_link(desk: Desk) -> None:
    fleet_of_three(desk)
    attempt = await desk.dispatch(BODY)
    desk.now_s += 1.0
    attempt.first_byte()
    attempt.usage(Usage(prompt_tokens=len(PROMPT), completion_tokens=4, cached_tokens=len(PROMPT)))
    attempt.finish(Outcome.OK, 200)
    assert desk.calibration.observations == 0


async def test_what_did_not_come_is_held_against_both_sources(desk: Desk) -> None:
    fleet_of_three(desk)
    attempt = await desk.dispatch(BODY)
    attempt.first_byte()
    attempt.usage(Usage(prompt_tokens=len(PROMPT), completion_tokens=4, cached_tokens=0))
    attempt.finish(Outcome.OK, 200)
    assert desk.trust.of("a", desk.now_s) < 1.0
    assert desk.trust.of("b", desk.now_s) < 1.0
    assert desk.trust.of("w", desk.now_s) == 1.0


async def test_a_fallback_never_is_one_of_the_sources_nor_stock(desk: Desk) -> None:
    fleet_of_three(desk)
    desk.add("stock", p2p="stock:5710")
    desk.add("spare", extension="spare:5720")
    decision = desk.dispatcher._decide_now(
        request := desk.request(BODY),
        await desk.dispatcher._reader.read(request),
        False,
        frozenset(),
        None,
    )[0]
    chosen, *others = decision.planned.ranking
    assert len(chosen.pulls) == 2
    able = {plan.worker: takes_the_same(plan, chosen, None, MODEL, desk.fleet.get) for plan in others}
    idle = {"w", "spare"} - {chosen.worker}
    assert able == {"a": False, "b": False, "stock": False, **dict.fromkeys(idle, True)}
