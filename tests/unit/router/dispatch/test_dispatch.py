# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from indexer.identity import WorkerId
from router.errors import NoWorkerAvailable, TransferParamsRefused
from router.fleet.poller import PollResult, Reach
from router.request import Outcome, Usage

from .conftest import BLOCK, MODEL, Desk

PROMPT = list(range(100, 100 + 200 * BLOCK + 5))


def header(pairs: tuple[tuple[bytes, bytes], ...], name: bytes) -> str | None:
    found = [value.decode() for key, value in pairs if key == name]
    assert len(found) <= 1
    return found[0] if found else None


async def test_the_holder_is_chosen_and_headers_and_record_say_so(desk: Desk) -> None:
    for worker in ("a", "b", "c", "d"):
        desk.add(worker)
    desk.store("c", PROMPT)
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT})
    route = attempt.route
    assert (route.worker_id, route.base_url, route.insert) == ("c", "http://c", {})
    assert header(route.response_headers, b"x-pointsman-worker") == "c"
    assert header(route.response_headers, b"x-pointsman-path") == "hbm:200,recompute:1"
    assert header(route.response_headers, b"x-pointsman-fallback") is None
    assert header(route.response_headers, b"x-request-id") == attempt.request.request_id
    [record] = desk.log.get(attempt.request.request_id)
    assert record.predicted_cached_tokens == 200 * BLOCK
    assert record.tokens_from == "given"
    assert record.candidate_count == 4
    assert "c costs" in record.reason
    assert str(PROMPT[0]) not in record.reason


async def test_the_rank_that_holds_the_prefix_is_named_to_a_worker_with_several(desk: Desk) -> None:
    desk.add("a", ranks=4)
    desk.add("b")
    desk.store("a", PROMPT, rank=2)
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT})
    assert attempt.route.worker_id == "a"
    assert header(attempt.route.upstream_headers, b"x-data-parallel-rank") == "2"
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT}, tried=frozenset({"a"}))
    assert header(attempt.route.upstream_headers, b"x-data-parallel-rank") is None


async def test_a_rank_that_the_client_pinned_is_kept(desk: Desk) -> None:
    desk.add("a", ranks=4)
    desk.store("a", PROMPT, rank=2)
    request = desk.request({"model": MODEL, "prompt": PROMPT}, headers={"x-data-parallel-rank": "1"})
    attempt = await desk.dispatcher.dispatch(request, frozenset())
    assert header(attempt.route.upstream_headers, b"x-data-parallel-rank") == "1"


async def test_an_adapter_s_blocks_are_not_the_base_model_s(desk: Desk) -> None:
    for worker in ("a", "b"):
        desk.add(worker)
    desk.store("a", PROMPT, lora="lora")
    desk.store("b", PROMPT)
    for model, worker in (("lora", "a"), (MODEL, "b")):
        attempt = await desk.dispatch({"model": model, "prompt": PROMPT})
        assert attempt.route.worker_id == worker
        attempt.finish(Outcome.OK, 200)


async def test_each_attempt_at_a_pull_carries_a_fresh_id_and_never_its_own_worker(desk: Desk) -> None:
    for worker in ("a", "b", "c"):
        desk.add(worker, p2p=f"10.0.0.{ord(worker)}:7000")
    desk.store("a", PROMPT, in_ram=True)
    desk.fleet.set_drain("a", drain=True)
    request = desk.request({"model": MODEL, "prompt": PROMPT})
    first = await desk.dispatcher.dispatch(request, frozenset())
    second = await desk.dispatcher.dispatch(request, frozenset({first.route.worker_id}))
    sources = [attempt.route.insert["kv_transfer_params"] for attempt in (first, second)]
    assert all(isinstance(source, dict) for source in sources)
    keys = [source["remote_kv_source"] for source in sources if isinstance(source, dict)]
    assert {key["remote_host"] for key in keys} == {f"10.0.0.{ord('a')}"}
    assert len({key["kv_request_id"] for key in keys}) == 2
    assert {first.route.worker_id, second.route.worker_id} == {"b", "c"}
    assert desk.board.pulls("a") == 2
    first.finish(Outcome.WORKER_ERROR, None)
    second.finish(Outcome.OK, 200)
    assert desk.board.pulls("a") == 0
    assert [record.attempt for record in desk.log.get(request.request_id)] == [1, 2]


@pytest.mark.parametrize("draining", [False, True])
async def test_a_worker_that_no_longer_answers_is_never_a_source(desk: Desk, draining: bool) -> None:
    for worker in ("a", "b"):
        desk.add(worker, p2p=f"10.0.0.{ord(worker)}:7000")
    desk.store("a", PROMPT, in_ram=True)
    desk.fleet.set_drain("a", drain=draining)
    request = desk.request({"model": MODEL, "prompt": PROMPT})
    alive = await desk.dispatcher.dispatch(request, frozenset({"a"}))
    assert "kv_transfer_params" in alive.route.insert
    alive.finish(Outcome.OK, 200)
    # vLLM stalls for its handshake time-out on a dead source; draining must not hide the death.
    member = desk.fleet._members["a"]
    desk.fleet._apply(member, PollResult(Reach.REFUSED, "refused", None, None), desk.now_s)
    dead = await desk.dispatcher.dispatch(request, frozenset({"a"}))
    assert dead.route.insert == {}
    dead.finish(Outcome.OK, 200)


@pytest.mark.parametrize("more", [{"n": 2}, {"prompt": [PROMPT, PROMPT]}, {"use_beam_search": True, "n": 2}])
async def test_requests_of_several_sequences_are_not_told_to_pull(
    desk: Desk, more: dict[str, object]
) -> None:
    for worker in ("a", "b"):
        desk.add(worker, p2p=f"10.0.0.{ord(worker)}:7000")
    desk.store("a", PROMPT, in_ram=True)
    desk.fleet.set_drain("a", drain=True)
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT, **more})
    assert attempt.route.insert == {}


async def test_transfer_params_of_a_client_are_refused_unless_trusted_and_then_left_alone() -> None:
    body = {"model": MODEL, "prompt": PROMPT, "kv_transfer_params": {"remote_kv_source": {}}}
    desk = Desk()
    desk.add("a")
    with pytest.raises(TransferParamsRefused, match="trust_transfer_params"):
        await desk.dispatch(body)
    with pytest.raises(TransferParamsRefused):
        await desk.dispatcher.explain(desk.request(body))
    assert desk.board.in_flight("a") == 0
    trusting = Desk(trust_transfer_params=True)
    trusting.add("a", p2p="10.0.0.1:7000")
    trusting.add("b", p2p="10.0.0.2:7000")
    trusting.store("a", PROMPT, in_ram=True)
    trusting.fleet.set_drain("a", drain=True)
    assert (await trusting.dispatch(body)).route.insert == {}
    # An explicit null asks for nothing and is no reason to refuse.
    assert await desk.dispatch({**body, "kv_transfer_params": None})


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/embeddings", {"model": MODEL, "input": "x"}, "unknown_path"),
        ("/v1/completions", b"{", "unparsable_body"),
        ("/v1/completions", {"model": MODEL}, "no_prompt"),
        (
            "/v1/completions",
            {"model": MODEL, "prompt": "no tokenizer and no worker to ask"},
            "tokenizer_error",
        ),
    ],
)
async def test_what_cannot_be_read_is_routed_by_load_and_says_why(
    desk: Desk, path: str, body: dict[str, object] | bytes, reason: str
) -> None:
    desk.add("a")
    desk.add("b")
    workers = set()
    for _ in range(2):
        attempt = await desk.dispatch(body, path)
        workers.add(attempt.route.worker_id)
        assert header(attempt.route.response_headers, b"x-pointsman-fallback") == reason
        assert header(attempt.route.response_headers, b"x-pointsman-path") is None
        assert attempt.record.fallback == reason
    assert workers == {"a", "b"}
    assert desk.count("pointsman_fallbacks_total", reason=reason) == 2


async def test_a_fleet_without_events_says_that_there_is_no_index(desk: Desk) -> None:
    desk.add("a", events=False)
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT})
    assert attempt.record.fallback == "no_index"
    assert attempt.record.index_age_s is None


async def test_no_worker_is_a_reason_and_a_count_and_leaves_no_load(desk: Desk) -> None:
    with pytest.raises(NoWorkerAvailable) as caught:
        await desk.dispatch({"model": MODEL, "prompt": PROMPT})
    assert caught.value.reason == "no_workers"
    desk.add("a")
    with pytest.raises(NoWorkerAvailable, match="all_tried"):
        await desk.dispatch({"model": MODEL, "prompt": PROMPT}, tried=frozenset({"a"}))
    assert desk.count("pointsman_refused_total", reason="no_workers") == 1
    assert desk.board.in_flight("a") == 0


async def test_a_dry_run_promises_and_keeps_nothing(desk: Desk) -> None:
    desk.add("a")
    desk.store("a", PROMPT)
    request = desk.request({"model": MODEL, "prompt": PROMPT})
    record = await desk.dispatcher.explain(request)
    assert (record.worker, record.path_blocks) == ("a", {"hbm": 200, "recompute": 1})
    assert desk.board.in_flight("a") == 0
    assert len(desk.log) == 0
    assert desk.count("pointsman_decisions_total", policy="kv_aware") == 0


async def test_an_attempt_is_load_until_it_ends_however_often_its_end_is_told(desk: Desk) -> None:
    desk.add("a")
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT, "stream": True})
    assert desk.board.in_flight("a") == 1
    assert desk.board.queue_s("a", 0, desk.now_s) > 0
    desk.now_s += 0.25
    attempt.first_byte()
    desk.now_s += 1
    attempt.first_byte()
    assert attempt.record.observed.ttft_s == pytest.approx(0.25)
    assert desk.board.queue_s("a", 0, desk.now_s) == 0
    assert desk.board.decodes("a", 0, desk.now_s) == 1
    for outcome in (Outcome.OK, Outcome.WORKER_ERROR):
        attempt.finish(outcome, 200)
    attempt.first_byte()
    assert desk.board.in_flight("a") == 0
    assert desk.board.decodes("a", 0, desk.now_s) == 0
    assert attempt.record.observed.outcome == "ok"
    assert attempt.record.observed.duration_s == pytest.approx(1.25)
    assert desk.count("pointsman_attempts_total", worker="a", outcome="ok") == 1
    assert desk.count("pointsman_attempts_total", worker="a", outcome="worker_error") == 0


@pytest.mark.parametrize(
    ("reported", "stale", "lost"), [(3200, False, 0), (3201, False, 0), (3184, True, 16), (None, None, 0)]
)
async def test_the_engine_s_count_is_compared_with_the_promise(
    desk: Desk, reported: int | None, stale: bool | None, lost: int
) -> None:
    desk.add("a")
    desk.store("a", PROMPT)
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT})
    attempt.usage(Usage(prompt_tokens=len(PROMPT), completion_tokens=1, cached_tokens=reported))
    attempt.finish(Outcome.OK, 200)
    observed = attempt.record.observed
    assert (observed.cached_tokens, observed.stale) == (reported, stale)
    assert desk.count("pointsman_stale_tokens_total", worker="a") == lost
    assert desk.count("pointsman_stale_decisions_total", worker="a") == bool(lost)


async def test_failures_reach_the_breaker_and_the_fault_of_clients_does_not(desk: Desk) -> None:
    desk.add("a")
    desk.add("b")
    for outcome in (Outcome.CLIENT_ERROR, Outcome.CLIENT_GONE, Outcome.BUSY):
        for _ in range(10):
            attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT}, tried=frozenset({"b"}))
            attempt.finish(outcome, 400)
    status = desk.fleet.get("a")
    assert status is not None
    assert status.consecutive_failures == 0
    for _ in range(3):
        attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT}, tried=frozenset({"b"}))
        attempt.finish(Outcome.WORKER_ERROR, 500)
    desk.store("a", PROMPT)
    for _ in range(5):
        attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT})
        assert attempt.route.worker_id == "b"
        attempt.finish(Outcome.OK, 200)


async def test_a_worker_is_silent_after_five_prompts_that_made_blocks_and_no_event(desk: Desk) -> None:
    desk.add("a")

    async def serve(body: dict[str, Any], outcome: Outcome = Outcome.OK) -> bool:
        attempt = await desk.dispatch(body)
        desk.now_s += 1
        attempt.finish(outcome, 200)
        holders = desk.holders.workers()[WorkerId("a")]
        heard_s = max(holders.since_s, *(rank.applied_at_s or 0.0 for rank in holders.ranks))
        return desk.dispatcher.block_makers.is_silent("a", heard_s)

    whole: dict[str, Any] = {"model": MODEL, "prompt": PROMPT}
    desk.now_s += 1
    for body, outcome in (
        ({"model": MODEL, "prompt": PROMPT[:7]}, Outcome.OK),  # no full block
        (whole, Outcome.CLIENT_ERROR),
        (whole, Outcome.CLIENT_GONE),
        ({"model": MODEL, "prompt": "not tokenised " * 100}, Outcome.OK),
    ):
        for _ in range(10):
            assert not await serve(body, outcome)
    assert [await serve(whole) for _ in range(6)] == [False, False, False, False, True, True]
    desk.store("a", PROMPT)
    holders = desk.holders.workers()[WorkerId("a")]
    assert not desk.dispatcher.block_makers.is_silent("a", holders.ranks[0].applied_at_s or 0.0)
    # All its blocks are known now: nothing new is to be expected.
    for _ in range(10):
        assert not await serve(whole)


async def test_a_failure_within_the_tokenizer_costs_the_index_and_not_the_request(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object) -> None:
        raise RuntimeError("a fault of ours")

    desk.add("a")
    monkeypatch.setattr(desk.dispatcher._reader._tokens, "tokenize", fail)
    attempt = await desk.dispatch({"model": MODEL, "prompt": "x"})
    assert attempt.record.fallback == "tokenizer_error"


@pytest.mark.parametrize("policy", ["round_robin", "least_load"])
async def test_policies_that_ignore_the_index_do_not_tokenise(policy: str) -> None:
    desk = Desk(policy=policy)  # type: ignore[arg-type]
    desk.add("a")
    desk.add("b")
    desk.store("a", PROMPT)
    chosen = [(await desk.dispatch({"model": MODEL, "prompt": PROMPT})).route.worker_id for _ in range(4)]
    assert sorted(chosen) == ["a", "a", "b", "b"]
    [record] = desk.log.select(1)
    assert (record.fallback, record.tokens_from, record.prompt_tokens) == ("policy", None, 0)
