# SPDX-License-Identifier: Apache-2.0
"""What becomes of a decision after it was made: inputs, lines of the log, trust, lost tokens, regret."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from router.decisions.inputs import DecisionInputs
from router.decisions.record import DecisionRecord
from router.decisions.report import PlanReport
from router.fleet.poller import PollResult, Reach
from router.outcomes import RoutedAttempt
from router.request import Outcome, Usage

from .conftest import BLOCK, MODEL, Desk
from .lines import Lines

PROMPT = list(range(100, 100 + 200 * BLOCK + 5))
N = len(PROMPT)


@pytest.fixture
def lines(desk: Desk) -> Lines:
    lines = Lines()
    desk.recorder.writer = lines  # type: ignore[assignment]
    return lines


async def idle() -> None:
    """Let what waits for the loop have its turn."""
    await asyncio.sleep(0)


async def begin(desk: Desk, **body: Any) -> RoutedAttempt:
    return await desk.dispatch({"model": MODEL, "prompt": PROMPT, "stream": True} | body)


async def end(desk: Desk, attempt: RoutedAttempt, cached: int | None, ttft_s: float = 0.1) -> DecisionRecord:
    desk.now_s += ttft_s
    attempt.first_byte()
    attempt.usage(Usage(prompt_tokens=N, completion_tokens=3, cached_tokens=cached))
    attempt.finish(Outcome.OK, 200)
    await idle()
    return attempt.record


async def test_inputs_and_the_line_of_a_decision_follow_when_the_loop_is_free(
    desk: Desk, lines: Lines
) -> None:
    desk.add("a")
    desk.store("a", PROMPT)
    attempt = await begin(desk)
    assert lines.lines == []
    await idle()
    assert len(lines.lines) == 1
    [record] = lines.joined().records.values()
    assert (record.id, record.worker, record.constants.partition(":")[0]) == (
        attempt.record.id,
        "a",
        "default",
    )
    inputs = msgspec.json.decode(record.inputs, type=DecisionInputs)
    assert inputs.candidates[0].residence[0].hbm == ((0, 200),)
    assert lines.joined().finished == set()
    await end(desk, attempt, 200 * BLOCK)
    [record] = lines.joined().records.values()
    assert (record.observed.outcome, record.observed.cached_tokens) == ("ok", 200 * BLOCK)
    assert lines.joined().finished == {(attempt.record.id, 1)}


async def test_each_attempt_has_its_line_and_its_outcome(desk: Desk, lines: Lines) -> None:
    desk.add("a")
    desk.add("b")
    request = desk.request({"model": MODEL, "prompt": PROMPT})
    first = await desk.dispatcher.dispatch(request, frozenset())
    first.finish(Outcome.WORKER_ERROR, None)
    second = await desk.dispatcher.dispatch(request, frozenset({first.route.worker_id}))
    second.finish(Outcome.OK, 200)
    await idle()
    joined = lines.joined()
    outcomes = {key[1]: record.observed.outcome for key, record in joined.records.items()}
    assert outcomes == {1: "worker_error", 2: "ok"}
    assert len(joined.finished) == 2


async def test_a_failure_of_the_log_costs_the_line_and_not_the_request(
    desk: Desk, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.add("a")

    def fail(_: bytes) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(lines, "write", fail)
    record = await end(desk, await begin(desk), 0)
    assert record.observed.outcome == "ok"
    assert desk.board.in_flight("a") == 0


async def test_constants_are_those_of_the_decision_though_answers_come_before_the_loop_is_free(
    desk: Desk, lines: Lines
) -> None:
    desk.add("a")
    early = [await begin(desk) for _ in range(3)]
    before = desk.calibration.model_for("a").profile.prefill_s_per_token
    late = await begin(desk)
    for attempt in early:
        desk.now_s += 5.0
        attempt.first_byte()
        attempt.usage(Usage(prompt_tokens=N, completion_tokens=3, cached_tokens=0))
    assert desk.calibration.model_for("a").profile.prefill_s_per_token != pytest.approx(before, rel=0.05)
    await idle()
    record = lines.joined().records[late.record.id, 1]
    inputs = msgspec.json.decode(record.inputs, type=DecisionInputs)
    assert inputs.constants[0][1] == pytest.approx(before, rel=1e-6)


# Lost tokens


async def test_lost_tokens_are_split_by_cause_and_add_up_to_the_prompt(desk: Desk) -> None:
    desk.add("a")
    desk.add("b")
    desk.store("a", PROMPT)
    desk.fleet.set_drain("a", drain=True)
    elsewhere = await end(desk, await begin(desk), 0)
    assert elsewhere.reachable_cached_tokens == 0, "a draining worker is no candidate, and has no P2P tier"
    desk.fleet.set_drain("a", drain=False)
    stale = await end(desk, await begin(desk), 50 * BLOCK)
    observed = stale.observed
    assert (observed.lost_workload, observed.lost_routing, observed.lost_stale) == (5, 0, 150 * BLOCK)
    assert observed.stale is True
    assert desk.count("pointsman_lost_tokens_total", kind="stale") == 150 * BLOCK
    assert desk.count("pointsman_lost_tokens_total", kind="workload") == N + 5
    assert desk.count("pointsman_lost_tokens_total", kind="routing") == 0


async def test_what_a_busy_worker_holds_and_an_idle_one_computes_is_lost_by_routing(desk: Desk) -> None:
    desk.add("a")
    desk.add("b")
    desk.store("a", PROMPT)
    desk.board.promise("a", 0, 60.0, 60.0, desk.now_s)
    record = await end(desk, await begin(desk), 0)
    assert record.worker == "b"
    assert record.reachable_cached_tokens == 200 * BLOCK
    assert (record.observed.lost_workload, record.observed.lost_routing) == (5, 200 * BLOCK)
    assert desk.count("pointsman_lost_tokens_total", kind="routing") == 200 * BLOCK


@pytest.mark.parametrize("body", [{"prompt": "text that nobody can tokenise"}])
async def test_nothing_is_said_of_prompts_that_are_not_known(desk: Desk, body: dict[str, Any]) -> None:
    desk.add("a")
    record = await end(desk, await begin(desk, **body), 0)
    assert (record.reachable_cached_tokens, record.observed.lost_workload) == (None, None)
    assert record.observed.regret_s is None


async def test_nothing_is_said_where_the_engine_counts_other_tokens(desk: Desk) -> None:
    desk.add("a")
    attempt = await begin(desk)
    attempt.usage(Usage(prompt_tokens=N + 3, completion_tokens=1, cached_tokens=0))
    attempt.finish(Outcome.OK, 200)
    assert attempt.record.observed.lost_workload is None


# Trust


async def test_a_stale_map_costs_its_worker_trust(desk: Desk) -> None:
    desk.add("a")
    desk.store("a", PROMPT)
    await end(desk, await begin(desk), 0)
    low = desk.trust.of("a", desk.now_s)
    assert low < 0.95
    assert desk.trust.of("a", desk.now_s + 3600.0) == pytest.approx(1.0)


async def test_blocks_that_a_pull_did_not_bring_cost_the_source_its_trust(desk: Desk) -> None:
    for worker in ("a", "b"):
        desk.add(worker, p2p=f"10.0.0.{ord(worker)}:7000")
    desk.store("a", PROMPT, in_ram=True)
    desk.fleet.set_drain("a", drain=True)
    attempt = await begin(desk)
    assert attempt.record.source == "a"
    await end(desk, attempt, 0)
    assert desk.trust.of("a", desk.now_s) < 0.95
    assert desk.trust.of("b", desk.now_s) == 1.0


async def test_a_plan_that_the_client_replaced_is_held_against_nobody() -> None:
    desk = Desk(trust_transfer_params=True)
    desk.add("a")
    desk.store("a", PROMPT)
    record = await end(desk, await begin(desk, kv_transfer_params={"do_remote_decode": True}), 0)
    assert desk.trust.of("a", desk.now_s) == 1.0
    assert record.observed.regret_s is None


@pytest.mark.parametrize("body", [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}])
async def test_a_request_that_wants_its_whole_prompt_computed_is_held_against_nobody(
    desk: Desk, body: dict[str, Any]
) -> None:
    desk.add("a")
    desk.store("a", PROMPT)
    record = await end(desk, await begin(desk, **body), 0)
    assert desk.trust.of("a", desk.now_s) == 1.0
    assert (record.observed.lost_stale, record.observed.regret_s) == (None, None)


async def test_a_lying_worker_loses_requests_to_an_honest_one_and_gets_them_back(desk: Desk) -> None:
    desk.add("liar")
    desk.add("honest")
    desk.store("liar", PROMPT)
    desk.store("honest", PROMPT)

    async def share_of_liar(requests: int, *, lies: bool) -> int:
        chosen = 0
        for _ in range(requests):
            # Not streamed, so that calibration learns nothing and only trust tells the two apart.
            attempt = await begin(desk, stream=False)
            liar = attempt.record.worker == "liar"
            await end(desk, attempt, 0 if lies and liar else 200 * BLOCK, ttft_s=0.01)
            chosen += liar
        return chosen

    assert 10 <= await share_of_liar(40, lies=False) <= 30
    assert await share_of_liar(40, lies=True) <= 10
    assert await share_of_liar(40, lies=True) <= 2
    desk.now_s += 4 * 3600.0
    assert 5 <= await share_of_liar(40, lies=False) <= 35


async def test_another_process_is_trusted_anew(desk: Desk) -> None:
    desk.add("a")
    desk.store("a", PROMPT)
    await end(desk, await begin(desk), 0)
    desk.trust.forget("a")
    assert desk.trust.of("a", desk.now_s) == 1.0


# Regret


async def test_regret_is_the_time_beyond_the_best_candidate_and_never_below_nothing(desk: Desk) -> None:
    desk.add("a")
    desk.store("a", PROMPT)
    quick = await end(desk, await begin(desk), 200 * BLOCK, ttft_s=0.001)
    assert quick.observed.regret_s == 0.0
    slow = await end(desk, await begin(desk), 200 * BLOCK, ttft_s=9.0)
    assert slow.observed.regret_s == pytest.approx(9.0, abs=1.0)
    assert desk.count("pointsman_regret_seconds_count") == 2
    assert desk.count("pointsman_regret_seconds_sum") == pytest.approx(slow.observed.regret_s)


async def test_regret_is_not_told_of_answers_whose_first_token_is_not_seen(desk: Desk) -> None:
    desk.add("a")
    attempt = await begin(desk, stream=False)
    record = await end(desk, attempt, 0)
    assert record.observed.regret_s is None


# Reports of an engine extension


async def test_a_report_gives_the_tiers_and_another_outcome_line(desk: Desk, lines: Lines) -> None:
    desk.add("a")
    desk.store("a", PROMPT, in_ram=True)
    record = await end(desk, await begin(desk), 200 * BLOCK)
    assert record.observed.tiers is None
    assert record.predicted_tiers == {"hbm": 200 * BLOCK}
    report = PlanReport(tiers={"hbm": 100, "ram": 60})
    assert desk.recorder.reported(record.id, 1, report)
    [logged] = lines.joined().records.values()
    assert (logged.observed.tiers, logged.observed.report) == ({"hbm": 100, "ram": 60}, report)
    assert not desk.recorder.reported(record.id, 2, report)
    assert not desk.recorder.reported("unknown", 1, report)


async def test_a_dry_run_has_its_inputs_and_no_line(desk: Desk, lines: Lines) -> None:
    desk.add("a")
    record = await desk.dispatcher.explain(desk.request({"model": MODEL, "prompt": PROMPT}))
    await idle()
    assert isinstance(record.inputs, msgspec.Raw)
    assert lines.lines == []


async def test_a_worker_that_left_before_its_answer_still_has_its_outcome(desk: Desk, lines: Lines) -> None:
    desk.add("a")
    attempt = await begin(desk)
    member = desk.fleet._members["a"]
    desk.fleet._apply(member, PollResult(Reach.REFUSED, "refused", None, None), desk.now_s)
    attempt.finish(Outcome.WORKER_ERROR, None)
    await idle()
    assert [one.observed.outcome for one in lines.joined().records.values()] == ["worker_error"]
