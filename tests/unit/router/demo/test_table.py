# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
import shlex

from router.demo.examples import render_examples
from router.demo.results import RunResult
from router.demo.table import render_overhead, render_saving, render_table

PLAIN = RunResult(
    policy="round_robin",
    requests=10,
    prompt_tokens=100_000,
    cached_tokens=25_000,
    ttft_p50_s=0.8,
    ttft_p99_s=2.0,
    path_blocks=None,
    peer_pulls=0,
    stale=0,
    largest_share=0.25,
    overhead_p50_s=0.002,
    prediction_error_p50_s=None,
)
ROUTED = RunResult(
    policy="kv_aware",
    requests=10,
    prompt_tokens=100_000,
    cached_tokens=75_000,
    ttft_p50_s=0.04,
    ttft_p99_s=2.5,
    path_blocks={"hbm": 4000, "ram": 0, "peer": 687, "recompute": 1563},
    peer_pulls=1,
    stale=2,
    largest_share=0.4,
    overhead_p50_s=0.003,
    prediction_error_p50_s=0.012,
)


def cells(text: str) -> dict[str, list[str]]:
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_the_table_has_a_column_per_policy_and_a_row_per_figure() -> None:
    text = render_table([PLAIN, ROUTED])
    rows = cells(text)
    assert text.splitlines()[0].split() == ["round_robin", "kv_aware"]
    assert rows["cached tokens (engines' count)"] == ["25,000 (25.0%)", "75,000 (75.0%)"]
    assert rows["TTFT p50"] == ["800 ms", "40 ms"]
    assert rows["TTFT p99"] == ["2,000 ms", "2,500 ms"]
    assert rows["blocks planned by peer"] == ["-", "687"]
    assert rows["blocks planned by ram"] == ["-", "0"]
    assert rows["requests served by a peer pull"] == ["-", "1"]
    assert rows["decisions that promised too much"] == ["-", "2"]
    assert rows["most loaded worker's share"] == ["25%", "40%"]


def test_columns_end_at_the_same_place() -> None:
    lines = render_table([PLAIN, ROUTED]).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_the_saving_says_which_way_each_figure_went() -> None:
    text = render_saving(PLAIN, ROUTED)
    assert "50,000 prompt tokens not recomputed (50% of all)" in text
    assert "p50 20.0 times shorter" in text
    assert "p99 1.2 times longer" in text
    assert "50,000 prompt tokens recomputed in addition" in render_saving(ROUTED, PLAIN)


def test_the_overhead_is_named_and_the_prediction_only_where_there_was_one() -> None:
    assert "3 ms (p50) pass outside" in render_overhead(ROUTED)
    assert "differ by 12 ms" in render_overhead(ROUTED)
    assert "differ" not in render_overhead(PLAIN)


def test_the_examples_are_commands_a_shell_can_run() -> None:
    text = render_examples("http://127.0.0.1:8080", "m", "It's a document. " * 100)
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("  curl")]
    urls = {
        word.removeprefix("http://127.0.0.1:8080") for words in commands for word in words if "8080" in word
    }
    assert urls >= {"/v1/chat/completions", "/admin/api/decisions?limit=3", "/admin/api/explain", "/metrics"}
    body = json.loads(next(words for words in commands if "-d" in words)[-1])
    assert body["model"] == "m"
    assert body["messages"][0]["content"].startswith("It's a document.")
