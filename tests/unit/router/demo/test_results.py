# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from router.decisions.record import DecisionRecord, Observation
from router.demo.client import Sample
from router.demo.results import percentile, pulled, summarise


def sample(request_id: str, worker: str = "w0", ttft_s: float = 0.5, cached: int = 0) -> Sample:
    return Sample(request_id, worker, ttft_s, 1000, cached)


def record(
    request_id: str,
    blocks: dict[str, int],
    promised: int = 0,
    *,
    attempt: int = 1,
    tokens: int = 1000,
    predicted_s: float = 0.4,
    ttft_s: float | None = 0.45,
    stale: bool = False,
) -> DecisionRecord:
    return DecisionRecord(
        id=request_id,
        attempt=attempt,
        time_unix_s=0.0,
        model=None,
        tenant=None,
        policy="kv_aware",
        prompt_tokens=tokens,
        prompt_blocks=63,
        index_version=0,
        index_age_s=None,
        tokens_from="worker",
        candidates=[],
        candidate_count=0,
        worker="w0",
        dp_rank=0,
        path_blocks=blocks,
        source=None,
        predicted_cached_tokens=promised,
        predicted_ttft_s=predicted_s,
        transfer_params=None,
        reason="",
        fallback=None,
        observed=Observation(ttft_s=ttft_s, stale=stale),
    )


def test_a_percentile_is_the_nearest_rank() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile([3.0], 50) == percentile([3.0], 99) == 3.0


def test_tokens_times_and_shares_are_those_of_the_samples() -> None:
    samples = [
        sample("a", "w0", 0.1, 600),
        sample("b", "w0", 0.2, 200),
        sample("c", "w1", 0.9),
        sample("d", "w0", 0.3),
    ]
    result = summarise("p", samples, [])
    assert (result.requests, result.prompt_tokens, result.cached_tokens) == (4, 4000, 800)
    assert (result.ttft_p50_s, result.ttft_p99_s) == (0.2, 0.9)
    assert result.largest_share == 0.75


def test_blocks_are_counted_by_path_for_the_last_attempt_only() -> None:
    records = [
        record("a", {"hbm": 60, "recompute": 3}, attempt=2),
        record("a", {"recompute": 63}, attempt=1),
        record("b", {"peer": 50, "recompute": 13}),
        record("someone else's", {"ram": 9}),
    ]
    result = summarise("p", [sample("a"), sample("b")], records)
    assert result.path_blocks == {"hbm": 60, "ram": 0, "peer": 50, "recompute": 16}


def test_a_policy_that_reads_no_prompt_has_no_paths() -> None:
    result = summarise("round_robin", [sample("a")], [record("a", {"recompute": 70}, tokens=0)])
    assert result.path_blocks is None
    assert result.peer_pulls == 0
    assert result.prediction_error_p50_s is None


def test_a_pull_counts_when_the_engine_cached_what_it_was_to_bring() -> None:
    planned = record("a", {"hbm": 5, "peer": 50}, promised=880)
    assert pulled(planned, 880)
    assert pulled(planned, 900)
    assert not pulled(planned, 80), "the peer's blocks did not come"
    assert not pulled(record("a", {"hbm": 55}, promised=880), 880)
    result = summarise(
        "p", [sample("a", cached=880), sample("b", cached=80)], [planned, record("b", {"peer": 50}, 800)]
    )
    assert result.peer_pulls == 1


def test_overhead_and_prediction_error_are_differences_to_what_the_gateway_saw() -> None:
    records = [
        record("a", {"hbm": 1}, predicted_s=0.40, ttft_s=0.45, stale=True),
        record("b", {}, ttft_s=None),
    ]
    result = summarise("p", [sample("a", ttft_s=0.5), sample("b")], records)
    assert result.overhead_p50_s == pytest.approx(0.05)
    assert result.prediction_error_p50_s == pytest.approx(0.05)
    assert result.stale == 1


def test_a_run_without_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="without requests"):
        summarise("p", [], [])
