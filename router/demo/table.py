# SPDX-License-Identifier: Apache-2.0
"""The demo's table and its last line. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.demo.results import PATHS, RunResult

_NONE = "-"


def render_table(results: Sequence[RunResult]) -> str:
    """One column per run, one row per figure."""
    rows = [["", *(result.policy for result in results)]]
    rows += [[name, *map(value, results)] for name, value in _rows()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *_right(row[1:], widths[1:])]).rstrip() for row in rows]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([lines[0], rule, *lines[1:]])


def render_saving(plain: RunResult, routed: RunResult) -> str:
    """What routing saved against ``plain``, in one sentence."""
    saved = routed.cached_tokens - plain.cached_tokens
    share = abs(saved) / plain.prompt_tokens if plain.prompt_tokens else 0.0
    what = "not recomputed" if saved >= 0 else "recomputed in addition"
    return (
        f"{routed.policy} against {plain.policy}: {abs(saved):,} prompt tokens {what} ({share:.0%} of all), "
        f"TTFT p50 {_ratio(plain.ttft_p50_s, routed.ttft_p50_s)}, p99 {_ratio(plain.ttft_p99_s, routed.ttft_p99_s)}."
    )


def render_overhead(result: RunResult) -> str:
    """How much of the measured time is not the engines'."""
    text = (
        f"Of the TTFT under {result.policy}, {result.overhead_p50_s * 1000:.0f} ms (p50) pass outside of the "
        "chosen worker (client, gateway, tokenisation)"
    )
    if result.prediction_error_p50_s is not None:
        text += f"; predicted and observed TTFT differ by {result.prediction_error_p50_s * 1000:.0f} ms (p50)"
    return text + "."


def _rows() -> list[tuple[str, Callable[[RunResult], str]]]:
    paths = [(f"blocks planned by {path}", _path_row(path)) for path in PATHS]
    return [
        ("requests", lambda r: f"{r.requests:,}"),
        ("prompt tokens", lambda r: f"{r.prompt_tokens:,}"),
        ("cached tokens (engines' count)", _cached),
        ("TTFT p50", lambda r: _seconds(r.ttft_p50_s)),
        ("TTFT p99", lambda r: _seconds(r.ttft_p99_s)),
        *paths,
        ("requests served by a peer pull", lambda r: f"{r.peer_pulls:,}" if r.path_blocks else _NONE),
        ("decisions that promised too much", lambda r: f"{r.stale:,}" if r.path_blocks else _NONE),
        ("most loaded worker's share", lambda r: f"{r.largest_share:.0%}"),
    ]


def _path_row(path: str) -> Callable[[RunResult], str]:
    def value(result: RunResult) -> str:
        return _NONE if result.path_blocks is None else f"{result.path_blocks.get(path, 0):,}"

    return value


def _cached(result: RunResult) -> str:
    share = result.cached_tokens / result.prompt_tokens if result.prompt_tokens else 0.0
    return f"{result.cached_tokens:,} ({share:.1%})"


def _seconds(value_s: float) -> str:
    return f"{value_s * 1000:,.0f} ms"


def _ratio(plain_s: float, routed_s: float) -> str:
    if routed_s <= plain_s:
        return f"{plain_s / routed_s:.1f} times shorter"
    return f"{routed_s / plain_s:.1f} times longer"


def _right(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
