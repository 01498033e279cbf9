# SPDX-License-Identifier: Apache-2.0
"""Rows of a replay as an aligned table or as JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import msgspec

from router.replay.policies import AnyPolicyName
from router.replay.summary import ReplaySummary, Slo
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
    slo: Slo = field(default_factory=Slo)


_Column = tuple[str, Callable[[ReplaySummary], str]]

_ANSWERS: tuple[_Column, ...] = (
    ("requests", lambda s: f"{s.requests}"),
    ("p50", lambda s: f"{s.ttft_p50_s:.3f}"),
    ("p99", lambda s: f"{s.ttft_p99_s:.3f}"),
    ("mean", lambda s: f"{s.ttft_mean_s:.3f}"),
    ("tpot", lambda s: f"{1000 * s.tpot_p50_s:.1f}"),
    ("req/s", lambda s: f"{s.requests_per_s:.2f}"),
    ("out tok/s", lambda s: f"{s.output_tokens_per_s:.0f}"),
    ("good", lambda s: f"{s.goodput:.3f}"),
    ("good/s", lambda s: f"{s.goodput_requests_per_s:.2f}"),
    ("busiest", lambda s: f"{s.largest_share:.2f}"),
    ("stale", lambda s: f"{s.stale}"),
    ("error", lambda s: f"{s.ttft_error_median:.3f}"),
    ("retried", lambda s: f"{s.retried}"),
    ("failed", lambda s: f"{s.failed}"),
)

_CACHES: tuple[_Column, ...] = (
    ("hit", lambda s: f"{s.hit_rate:.3f}"),
    ("hbm", lambda s: f"{s.hit_rates['hbm']:.3f}"),
    ("ram", lambda s: f"{s.hit_rates['ram']:.3f}"),
    ("peer", lambda s: f"{s.hit_rates['peer']:.3f}"),
    ("storage", lambda s: f"{s.hit_rates['storage']:.3f}"),
    ("recomputed", lambda s: f"{s.recomputed_tokens}"),
    ("evicted", lambda s: f"{s.evicted_before_reuse}"),
    ("pulls", lambda s: f"{s.pulls}"),
    ("lookup", lambda s: f"{1000 * s.lookup_mean_s:.1f}"),
    ("promotion", lambda s: f"{1000 * s.promotion_mean_s:.1f}"),
    ("ram in", lambda s: _gigabytes(s, "ram_store")),
    ("ram out", lambda s: _gigabytes(s, "ram_load")),
    ("wire", lambda s: _gigabytes(s, "peer")),
    ("disk in", lambda s: _gigabytes(s, "storage_write")),
    ("disk out", lambda s: _gigabytes(s, "storage_read")),
)

_LEGEND = """\
p50, p99, mean: seconds to first token; tpot: median milliseconds per output token behind it; good: share of requests
answered within {ttft_s:g} s to the first token and {tpot_ms:g} ms for each further one; busiest: requests of the busiest
worker over the mean; stale: fewer cached tokens than predicted; error: median distance of the predicted from the
observed time to first token, relative.
hit: cached over prompt tokens, then by source; recomputed: prompt tokens; evicted: blocks computed again that a worker
had given up; lookup, promotion: milliseconds per question to a peer and per load into HBM; the rest: gigabytes moved."""

_REGRET_LEGEND = """
regret: of a sample of decisions, time to first token over that of the best one, less 1."""


def render_table(report: ReplayReport) -> str:
    """Two tables with a line per row: how requests were answered, and what the caches did. Columns are aligned."""
    title = (
        f"{report.trace}: {report.workers} workers, arrivals x {report.speedup:g}, "
        f"costs {report.profile}{', learnt on' if report.calibrated else ''}, engines {report.engine_profile}, seed {report.seed}"
    )
    left_out = [f"{report.too_long} requests left out as too long"] if report.too_long else []
    legend = _LEGEND.format(ttft_s=report.slo.ttft_s, tpot_ms=1000 * report.slo.tpot_s)
    judged = any(row.regret for row in report.rows)
    answers = _cells(report.rows, _ANSWERS)
    if judged:
        regrets = [["regret", "regret p95"], *(_regret(row.regret) for row in report.rows)]
        answers = [[*line, *regret] for line, regret in zip(answers, regrets, strict=True)]
    tables = [*_aligned(answers), "", *_aligned(_cells(report.rows, _CACHES))]
    return "\n".join([title, *left_out, "", *tables, "", legend + (_REGRET_LEGEND if judged else "")])


def _cells(rows: Sequence[ReplayRow], columns: Sequence[_Column]) -> list[list[str]]:
    heads = ["tiers", "policy", *(head for head, _ in columns)]
    return [heads, *([row.tiers, row.policy, *(show(row.figures) for _, show in columns)] for row in rows)]


def _gigabytes(figures: ReplaySummary, link: str) -> str:
    return f"{figures.moved_bytes[link] / 1e9:.1f}"


def render_json(report: ReplayReport) -> str:
    """One JSON document."""
    return msgspec.json.encode(report).decode()


def _regret(regret: Regret | None) -> list[str]:
    return [f"{regret.mean:.3f}", f"{regret.p95:.3f}"] if regret else ["", ""]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [_line(line, widths) for line in lines]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    names = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    figures = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join([*names, *figures])
