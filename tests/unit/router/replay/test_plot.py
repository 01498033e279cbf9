# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import fields
from typing import Any

import pytest

from router.replay.plot import render_page
from router.replay.policies import AnyPolicyName
from router.replay.report import ReplayReport, ReplayRow
from router.replay.summary import ReplaySummary
from router.replay.tiers import TierSet


def figures(**given: Any) -> ReplaySummary:
    values: dict[str, Any] = {field.name: 1 for field in fields(ReplaySummary)}
    return ReplaySummary(**values | given)


def row(
    policy: AnyPolicyName, tiers: TierSet = "p2p", *, p50_s: float = 1.0, p99_s: float = 2.0
) -> ReplayRow:
    curve = [p50_s * percent / 50 for percent in range(101)]
    return ReplayRow(tiers, policy, figures(ttft_p50_s=p50_s, ttft_p99_s=p99_s), None, curve)


def page(*rows: ReplayRow, trace: str = "trace.jsonl") -> str:
    return render_page(ReplayReport(trace, 8, "default", "default", False, 1.0, 0, 0, rows))


def svgs(text: str) -> list[ET.Element]:
    """Of a page of ours alone."""
    return [ET.fromstring(one) for one in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]  # noqa: S314


def test_each_figure_has_a_bar_per_policy_to_the_scale_of_the_largest() -> None:
    charts = svgs(page(row("kv_aware", p50_s=1.0), row("round_robin", p50_s=4.0)))
    median = charts[0]
    widths = [float(bar.attrib["width"]) for bar in median.findall("rect")]
    assert widths[1] == pytest.approx(4 * widths[0], rel=0.01)
    assert [text.text for text in median.findall("text")] == ["kv_aware", "1 s", "round_robin", "4 s"]
    assert [bar.attrib["class"] for bar in median.findall("rect")] == ["ours", "rest"]


def test_each_tier_set_has_its_own_section_with_a_curve_per_policy() -> None:
    text = page(row("kv_aware", "gpu"), row("kv_aware", "p2p"), row("oracle", "p2p"))
    assert re.findall(r"<h2>Tiers: (\w+)</h2>", text) == ["gpu", "p2p"]
    curves = [chart for chart in svgs(text) if chart.findall(".//title")]
    assert [[title.text for title in chart.findall(".//title")] for chart in curves] == [
        ["kv_aware"],
        ["oracle", "kv_aware"],
    ], "ours is drawn last, on top"


def test_curves_rise_to_the_right() -> None:
    chart = next(chart for chart in svgs(page(row("kv_aware", p50_s=0.5))) if chart.findall(".//title"))
    line = next(one for one in chart.findall("polyline") if one.find("title") is not None)
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert len(points) == 101
    assert points == sorted(points, key=lambda point: (point[0], -point[1]))


def test_the_page_needs_nothing_else_and_follows_light_and_dark() -> None:
    text = page(row("kv_aware"), trace='<b>&"trace')
    assert not re.search(r"(src|href)=|@import|url\(|<script", text)
    assert "prefers-color-scheme: dark" in text
    assert "<b>" not in text
    assert "&lt;b&gt;" in text
