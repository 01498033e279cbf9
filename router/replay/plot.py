# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page that needs nothing else: bars per figure, curves of the time to first token. Pure.

Charts are inline SVG; colours follow the reader's light or dark setting. Times of a curve are on a logarithmic axis,
since policies differ by factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from router.replay.report import ReplayReport, ReplayRow
from router.replay.summary import ReplaySummary

_BAR_WIDTH, _BAR_STEP, _LABEL_WIDTH, _VALUE_WIDTH = 400, 22, 96, 64
_CURVE_WIDTH, _CURVE_HEIGHT = 860, 320
_LEFT, _BOTTOM, _TOP, _KEY_WIDTH = 44, 30, 10, 130
_LEAST_S = 1e-3
_HUES = 8
"""Colours beside ours; a policy beyond them is dashed."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #66707b; --line: #d9dee3; --page: #ffffff; --ours: #0b62c4;
  --c0: #c1453b; --c1: #1d8a5b; --c2: #b97a0a; --c3: #7a4fc0; --c4: #0f8b98; --c5: #b83f87; --c6: #6b7d1e; --c7: #87604a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebef; --soft: #9aa5b1; --line: #38424c; --page: #14191e;
  --ours: #5ea9ff; --c0: #f0847b; --c1: #5fcb9b; --c2: #e6b450; --c3: #b69af0; --c4: #57c7d4; --c5: #ee8cc2;
  --c6: #b5c75c; --c7: #c9a28b; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; } p { color: var(--soft); }
h3 { font-size: .95rem; margin: .5rem 0 .25rem; font-weight: 600; }
.bars { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem 2rem; }
svg { width: 100%; height: auto; display: block; } text { fill: var(--ink); font-size: 12px; }
.soft { fill: var(--soft); } .grid { stroke: var(--line); stroke-width: 1; } .rest { fill: var(--soft); opacity: .55; }
.ours { fill: var(--ours); } .curve { fill: none; stroke-width: 1.5; } .curve.first { stroke-width: 3; }
"""


def render_page(report: ReplayReport) -> str:
    """The whole page."""
    about = (
        f"{report.workers} workers, arrivals x {report.speedup:g}, costs {report.profile}"
        f"{', learnt on' if report.calibrated else ''}, engines {report.engine_profile}, seed {report.seed}; SLO "
        f"{report.slo.ttft_s:g} s to the first token, {1000 * report.slo.tpot_s:g} ms for each further one"
    )
    return "".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>Replay of {escape(report.trace)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>Replay of {escape(report.trace)}</h1><p>{escape(about)}</p>",
            *_sections(report.rows),
            "</body></html>\n",
        ]
    )


def _sections(rows: Sequence[ReplayRow]) -> Iterator[str]:
    """One section per tier set, in the order of the report."""
    for tiers in dict.fromkeys(row.tiers for row in rows):
        here = [row for row in rows if row.tiers == tiers]
        yield f"<h2>Tiers: {escape(tiers)}</h2><div class='bars'>"
        for title, unit, value in _FIGURES:
            yield f"<div><h3>{title}</h3>{_bars(here, unit, value)}</div>"
        yield f"</div><h3>Share of requests with a first token within, seconds</h3>{_curves(here)}"


_FIGURES: tuple[tuple[str, str, Callable[[ReplaySummary], float]], ...] = (
    ("Time to first token, median", "s", lambda s: s.ttft_p50_s),
    ("Time to first token, 99th percentile", "s", lambda s: s.ttft_p99_s),
    ("Goodput: requests per second within the SLO", "/s", lambda s: s.goodput_requests_per_s),
)


def _bars(rows: Sequence[ReplayRow], unit: str, value: Callable[[ReplaySummary], float]) -> str:
    """One bar per policy, to the scale of the largest."""
    values = [value(row.figures) for row in rows]
    largest = max([*values, 1e-12])
    room = _BAR_WIDTH - _LABEL_WIDTH - _VALUE_WIDTH
    parts = []
    for place, (row, figure) in enumerate(zip(rows, values, strict=True)):
        y, length = place * _BAR_STEP, room * figure / largest
        kind = "ours" if row.policy == "kv_aware" else "rest"
        parts.append(
            f'<text x="{_LABEL_WIDTH - 8}" y="{y + 15}" text-anchor="end">{escape(row.policy)}</text>'
            f'<rect class="{kind}" x="{_LABEL_WIDTH}" y="{y + 3}" width="{max(length, 1):.1f}" height="{_BAR_STEP - 6}" rx="2"/>'
            f'<text class="soft" x="{_LABEL_WIDTH + max(length, 1) + 6:.1f}" y="{y + 15}">{figure:.3g} {unit}</text>'
        )
    return _svg(_BAR_WIDTH, len(rows) * _BAR_STEP, parts)


def _curves(rows: Sequence[ReplayRow]) -> str:
    """Percentiles over time, one line per policy, ours on top."""
    times = [max(one, _LEAST_S) for row in rows for one in row.ttft_percentiles_s] or [_LEAST_S]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    high = max(high, low + 1)
    room_x, room_y = _CURVE_WIDTH - _LEFT - _KEY_WIDTH, _CURVE_HEIGHT - _BOTTOM - _TOP

    def x(seconds: float) -> float:
        return _LEFT + room_x * (math.log10(max(seconds, _LEAST_S)) - low) / (high - low)

    def y(percent: float) -> float:
        return _TOP + room_y * (1 - percent / 100)

    parts = [*_grid(range(low, high + 1), x, y)]
    lines = []
    for place, row in enumerate(rows):
        points = " ".join(f"{x(t):.1f},{y(p):.1f}" for p, t in enumerate(row.ttft_percentiles_s))
        style = _line_style(place, row)
        name = escape(row.policy)
        lines.append(f'<polyline {style} points="{points}"><title>{name}</title></polyline>')
        key_x, key_y = _CURVE_WIDTH - _KEY_WIDTH + 12, _TOP + 12 + place * 18
        parts.append(
            f'<polyline {style} points="{key_x},{key_y} {key_x + 18},{key_y}"/>'
            f'<text x="{key_x + 24}" y="{key_y + 4}">{name}</text>'
        )
    ours_last = sorted(zip(rows, lines, strict=True), key=lambda one: one[0].policy == "kv_aware")
    return _svg(_CURVE_WIDTH, _CURVE_HEIGHT, [*parts, *(line for _, line in ours_last)])


def _line_style(place: int, row: ReplayRow) -> str:
    if row.policy == "kv_aware":
        return 'class="curve first" style="stroke: var(--ours)"'
    dash = ' stroke-dasharray="5 3"' if place > _HUES else ""
    return f'class="curve" style="stroke: var(--c{place % _HUES})"{dash}'


def _grid(decades: range, x: Callable[[float], float], y: Callable[[float], float]) -> Iterator[str]:
    for percent in (0, 25, 50, 75, 100):
        at = y(percent)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_CURVE_WIDTH - _KEY_WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="soft" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{percent} %</text>'
    for decade in decades:
        seconds = 10.0**decade
        at = x(seconds)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_CURVE_HEIGHT - _BOTTOM}"/>'
        yield f'<text class="soft" x="{at:.1f}" y="{_CURVE_HEIGHT - 10}" text-anchor="middle">{seconds:g}</text>'


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'
