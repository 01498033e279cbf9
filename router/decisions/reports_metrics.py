# SPDX-License-Identifier: Apache-2.0
"""Metrics of the reports that engine extensions send."""

from __future__ import annotations

from collections.abc import Container

from prometheus_client import CollectorRegistry, Counter

from router.decisions.report import PlanReport
from router.decisions.reports_evidence import OUR_DOING, TOO_SLOW, outcome_word

_OTHERS = {
    "agent",
    "failed",
    "malformed",
    "ok",
    "peer_gone",
    "peer_restarted",
    "refused",
    "stale_boot",
    "unknown_peer",
}
_OUTCOMES = OUR_DOING | TOO_SLOW | _OTHERS
"""Words of an extension; others are shown as ``other``, so that no engine can make metrics without bound."""


class ReportMetrics:
    """Counted once for each plan, however often its report comes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.reports = counter(
            "pointsman_reports", "Reports of engine extensions, by what became of them.", ("outcome",)
        )
        self._bytes = counter(
            "pointsman_report_bytes", "Bytes that reports say were moved, by path.", ("path",)
        )
        self._pulls = counter(
            "pointsman_report_pulls", "Pulls from peers, by how they ended.", ("source", "outcome")
        )
        self._stale = counter(
            "pointsman_report_stale_blocks", "Blocks promised at a peer that it said it lacked.", ("source",)
        )
        self._evicted = counter(
            "pointsman_report_evicted_blocks",
            "Blocks brought in for a request and evicted before anybody read them.",
            ("worker",),
        )

    def reported(self, report: PlanReport, workers: Container[str]) -> None:
        """The first report of a plan; ``workers`` are those of the fleet."""
        for one in report.sources:
            if one.bytes:
                self._bytes.labels("peer" if one.is_peer else one.kind).inc(one.bytes)
            if one.is_peer:
                source = one.source if one.source in workers else "unknown"
                word = outcome_word(one.outcome)
                self._pulls.labels(source, word if word in _OUTCOMES else "other").inc()
                if one.stale_blocks:
                    self._stale.labels(source).inc(one.stale_blocks)
        if report.promotion_bytes:
            self._bytes.labels("promotion").inc(report.promotion_bytes)

    def evicted(self, worker: str, blocks: int) -> None:
        if blocks > 0:
            self._evicted.labels(worker).inc(blocks)
