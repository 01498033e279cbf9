# SPDX-License-Identifier: Apache-2.0
"""Rows of a replay as an aligned table or as JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from router.replay.policies import AnyPolicyName
from router.replay.summary import ReplaySummary
from router.replay.tiers import TierSet


@dataclass(frozen=True, slots=True)
class Regret:
    """Of a sample of decisions: how much longer the first token took than after the best of them, relative to it."""

    decisions: int
    mean: float
    p95: float

    @classmethod
    def of(cls, regrets: Sequence[float]) -> Regret:
        """Figures of at least one decision."""
        ordered = sorted(regrets)
        p95 = ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)]
        return cls(len(ordered), fmean(ordered), p95)


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One policy over one fleet."""

    tiers: TierSet
    policy: AnyPolicyName
    figures: ReplaySummary
    regret: Regret | None = None
    """None: no decision was compared."""
    ttft_percentiles_s: Sequence[float] = ()
    """The 0th to the 100th."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """All rows and what they have in common."""

    trace: str
    workers: int
    profile: str
    engine_profile: str
    calibrated: bool
    """The costs were learnt from there on."""
    speedup: float
    seed: int
    too_long: int
    """Requests left out because no worker has room for them, or as longer than asked for."""
    rows: Sequence[ReplayRow]


_Column = tuple[str, Callable[[ReplaySummary], str]]

_COLUMNS: tuple[_Column, ...] = (
    ("requests", lambda s: f"{s.requests}"),
    ("hit", lambda s: f"{s.hit_rate:.3f}"),
    ("hbm", lambda s: f"{s.hit_rates['hbm']:.3f}"),
    ("ram", lambda s: f"{s.hit_rates['ram']:.3f}"),
    ("peer", lambda s: f"{s.hit_rates['peer']:.3f}"),
    ("storage", lambda s: f"{s.hit_rates['storage']:.3f}"),
    ("recomputed", lambda s: f"{s.recomputed_tokens}"),
    ("p50", lambda s: f"{s.ttft_p50_s:.3f}"),
    ("p99", lambda s: f"{s.ttft_p99_s:.3f}"),
    ("mean", lambda s: f"{s.ttft_mean_s:.3f}"),
    ("req/s", lambda s: f"{s.requests_per_s:.2f}"),
    ("out tok/s", lambda s: f"{s.output_tokens_per_s:.0f}"),
    ("busiest", lambda s: f"{s.largest_share:.2f}"),
    ("pulls", lambda s: f"{s.pulls}"),
    ("stale", lambda s: f"{s.stale}"),
    ("error", lambda s: f"{s.ttft_error_median:.3f}"),
)

_LEGEND = (
    "hit: cached over prompt tokens, then by source; p50, p99, mean: seconds to first token; busiest: requests of "
    "the busiest worker over the mean; stale: fewer cached tokens than predicted; error: median of predicted "
    "against observed time to first token; regret: time to first token over that of the best of all decisions, less 1."
)


def render_table(report: ReplayReport) -> str:
    """One line per row, columns aligned."""
    heads = ["tiers", "policy", *(head for head, _ in _COLUMNS)]
    cells = [[row.tiers, row.policy, *(show(row.figures) for _, show in _COLUMNS)] for row in report.rows]
    if any(row.regret for row in report.rows):
        heads += ["regret", "regret p95"]
        cells = [[*line, *_regret(row.regret)] for line, row in zip(cells, report.rows, strict=True)]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    title = (
        f"{report.trace}: {report.workers} workers, arrivals x {report.speedup:g}, "
        f"costs {report.profile}{', learnt on' if report.calibrated else ''}, engines {report.engine_profile}, seed {report.seed}"
    )
    left_out = [f"{report.too_long} requests left out as too long"] if report.too_long else []
    return "\n".join(
        [title, *left_out, "", _line(heads, widths), *(_line(c, widths) for c in cells), "", _LEGEND]
    )


def render_json(report: ReplayReport) -> str:
    """One JSON document."""
    return msgspec.json.encode(report).decode()


def _regret(regret: Regret | None) -> tuple[str, str]:
    return (f"{regret.mean:.3f}", f"{regret.p95:.3f}") if regret else ("", "")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    names = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    figures = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join([*names, *figures])
