# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from typing import Any

import pytest

from engine_ext.sim.request import Moved
from router.replay.report import ReplayReport, ReplayRow, render_json, render_table
from router.replay.summary import Slo, summarize
from router.replay.virtual import ReplayedRequest


def replayed(worker: str = "w0", **fields: Any) -> ReplayedRequest:
    values: dict[str, Any] = {
        "arrival_s": 0.0,
        "prompt_tokens": 100,
        "output_tokens": 10,
        "predicted_cached_tokens": 0,
        "predicted_ttft_s": 1.0,
        "source": None,
        "ticket": 0,
        "ttft_s": 1.0,
        "finished_s": 2.0,
        "cached_tokens": 0,
    }
    return ReplayedRequest(worker=worker, **values | fields)


def test_hit_rates_are_tokens_by_source_over_all_prompt_tokens() -> None:
    tiers = {"hbm": 30, "ram": 20, "peer": 10, "storage": 5}
    figures = summarize([replayed(cached_tokens=65, cached_by_tier=tiers), replayed(prompt_tokens=300)], 2)
    assert figures.hit_rates == {"hbm": 0.075, "ram": 0.05, "peer": 0.025, "storage": 0.0125}
    assert figures.hit_rate == pytest.approx(sum(figures.hit_rates.values()))
    assert figures.recomputed_tokens == 335


def test_quantiles_mean_and_throughput() -> None:
    many = [replayed(arrival_s=float(i), ttft_s=i + 1.0, finished_s=200.0 + i) for i in range(100)]
    figures = summarize(many, 1)
    assert (figures.ttft_p50_s, figures.ttft_p99_s, figures.ttft_mean_s) == (51.0, 100.0, 50.5)
    assert figures.requests_per_s == pytest.approx(100 / 299)
    assert figures.output_tokens_per_s == pytest.approx(1000 / 299)


def test_share_pulls_stale_and_error() -> None:
    figures = summarize(
        [
            replayed("w0", source="w1", cached_tokens=8, predicted_cached_tokens=9),
            replayed("w0", predicted_ttft_s=1.5),
            replayed("w0", predicted_ttft_s=0.8),
            replayed("w1", cached_tokens=9, predicted_cached_tokens=9),
        ],
        4,
    )
    assert figures.largest_share == 3.0
    assert (figures.pulls, figures.stale) == (1, 1)
    assert figures.ttft_error_median == pytest.approx(0.1)


def test_goodput_counts_answers_within_both_bounds_against_all_requests() -> None:
    def one(ttft_s: float, tpot_s: float, **fields: Any) -> ReplayedRequest:
        finished_s = 50.0 + ttft_s + 9 * tpot_s
        return replayed(arrival_s=50.0, ttft_s=ttft_s, finished_s=finished_s, **fields)

    many = [
        one(2.0, 0.049),
        one(2.1, 0.01),
        one(0.1, 0.06),
        one(1.0, 0.0, output_tokens=1),  # a single token has no pace
        replayed(arrival_s=50.0, ttft_s=0.1, finished_s=None, failed=True),
        replayed(arrival_s=50.0, ttft_s=None, finished_s=None, failed=True, worker="", attempts=0),
    ]
    figures = summarize(many, 1)
    span_s = 2.0 + 9 * 0.049
    assert figures.goodput == pytest.approx(2 / 6)
    assert figures.goodput_requests_per_s == pytest.approx(2 / span_s)
    assert figures.goodput_output_tokens_per_s == pytest.approx(11 / span_s)
    assert (figures.tpot_p50_s, figures.tpot_p99_s) == pytest.approx((0.049, 0.06))
    assert (figures.requests, figures.failed) == (6, 2)
    assert figures.requests_per_s == pytest.approx(4 / span_s)
    assert figures.ttft_p99_s == pytest.approx(2.1)
    loose = summarize(many, 1, Slo(ttft_s=3.0, tpot_s=0.1))
    assert loose.goodput == pytest.approx(4 / 6)


def test_what_was_moved_and_waited_for_is_the_sum_over_requests_and_the_mean_over_waits() -> None:
    moved = [
        Moved(peer_bytes=5, ram_load_bytes=7, lookups=1, lookup_s=0.25, promotions=2, promotion_s=0.5),
        Moved(peer_bytes=1, ram_store_bytes=3, storage_read_bytes=2, storage_write_bytes=4, lookups=1),
        Moved(),
    ]
    figures = summarize([replayed(moved=one, evicted_blocks=2) for one in moved], 1)
    assert figures.moved_bytes == {
        "ram_load": 7,
        "ram_store": 3,
        "peer": 6,
        "storage_read": 2,
        "storage_write": 4,
    }
    assert (figures.lookup_total_s, figures.lookup_mean_s) == (0.25, 0.125)
    assert (figures.promotion_total_s, figures.promotion_mean_s) == (0.5, 0.25)
    assert figures.evicted_before_reuse == 6


def test_a_second_attempt_is_predicted_from_when_it_was_sent() -> None:
    figures = summarize([replayed(ttft_s=3.0, delay_s=2.0, predicted_ttft_s=1.1, attempts=2)], 1)
    assert figures.ttft_error_median == pytest.approx(0.1)
    assert (figures.retried, figures.failed) == (1, 0)


def test_a_fleet_that_answers_nothing_has_figures_that_are_no_numbers() -> None:
    figures = summarize([replayed(ttft_s=None, finished_s=None, cached_tokens=None, failed=True)], 1)
    assert figures.goodput == 0.0
    assert all(
        math.isnan(value)
        for value in (figures.ttft_p50_s, figures.hit_rate, figures.tpot_p99_s, figures.requests_per_s)
    )


def test_no_requests_have_no_figures() -> None:
    with pytest.raises(ValueError, match="needs requests"):
        summarize([], 1)


def report() -> ReplayReport:
    figures = summarize([replayed()], 1)
    rows = [ReplayRow("gpu", "round_robin", figures), ReplayRow("p2p", "kv_aware", figures)]
    return ReplayReport("a.jsonl", 1, "default", "fast", True, 2.0, 7, 3, rows)


def test_table_has_a_line_per_row_with_aligned_columns() -> None:
    lines = render_table(report()).splitlines()
    assert lines[0] == "a.jsonl: 1 workers, arrivals x 2, costs default, learnt on, engines fast, seed 7"
    assert lines[1].startswith("3 requests left out")
    head, *rows = lines[3:6]
    assert [row.split()[:2] for row in rows] == [["gpu", "round_robin"], ["p2p", "kv_aware"]]
    assert {len(line) for line in rows} == {len(head)}
    assert len(head.split()) == len(rows[0].split()) + 1  # "out tok/s" is one head of two words


def test_json_carries_every_figure() -> None:
    document = json.loads(render_json(report()))
    assert [(row["tiers"], row["policy"]) for row in document["rows"]] == [
        ("gpu", "round_robin"),
        ("p2p", "kv_aware"),
    ]
    assert document["rows"][0]["figures"]["hit_rates"]["hbm"] == 0.0
    assert (document["too_long"], document["speedup"], document["seed"]) == (3, 2.0, 7)
