# SPDX-License-Identifier: Apache-2.0
"""Takes the reports of engine extensions: each is joined to its decision by the plan's id, and learnt from once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from router.costs.calibration import Calibration
from router.decisions.recorder import DecisionRecorder
from router.decisions.report import PlanReport
from router.decisions.reports_awaited import Awaited
from router.decisions.reports_evidence import (
    WorkerAt,
    peer_shares,
    plan_report,
    pull_observations,
    tier_observations,
)
from router.decisions.reports_metrics import ReportMetrics
from router.decisions.reports_wire import BatchMessage, MalformedReportsError, ReportMessage, read_batch
from router.fleet.fleet import Fleet
from router.fleet.worker import WorkerSpec, address_text, rank_address

_MOST_ENGINES = 4096


class Taken(NamedTuple):
    """What became of the reports of a batch; the answer to the engine."""

    joined: int = 0
    revised: int = 0
    duplicate: int = 0
    unknown: int = 0
    """Of plans of another replica, or that are not kept any more."""


class ReportDesk:
    """Runs on the event loop; no call blocks. A batch costs tens of microseconds per report."""

    def __init__(
        self,
        recorder: DecisionRecorder,
        fleet: Fleet,
        calibration: Calibration | None,
        metrics: ReportMetrics,
        monotonic_s: Callable[[], float],
    ) -> None:
        self._recorder = recorder
        self._fleet = fleet
        self._calibration = calibration
        self._metrics = metrics
        self._monotonic_s = monotonic_s
        self._dropped: OrderedDict[str, int] = OrderedDict()

    def take(self, body: bytes) -> Taken:
        """One batch.

        Raises:
            MalformedReportsError: the body is none; nothing of it is taken.
        """
        batch = self.read(body)
        return self.settle(self.take_known(batch))

    def read(self, body: bytes) -> BatchMessage:
        """The batch, with what its engine dropped counted.

        Raises:
            MalformedReportsError: the body is none.
        """
        try:
            batch = read_batch(body)
        except MalformedReportsError:
            self._metrics.reports.labels("malformed").inc()
            raise
        self._count_dropped(batch)
        return batch

    def take_known(self, batch: BatchMessage) -> list[str | None]:
        """What became of each report; None for those whose plan is not known here."""
        self._recorder.flush()
        worker_at = addresses(self._fleet)
        outcomes = [self._take_one(batch, message, worker_at) for message in batch.reports]
        for outcome in outcomes:
            if outcome is not None:
                self._metrics.reports.labels(outcome).inc()
        return outcomes

    def settle(self, outcomes: Iterable[str | None]) -> Taken:
        """The answer to the engine, once all who may know have said what became of each report."""
        counts = dict.fromkeys(Taken._fields, 0)
        for outcome in outcomes:
            counts[outcome or "unknown"] += 1
        if counts["unknown"]:
            self._metrics.reports.labels("unknown").inc(counts["unknown"])
        return Taken(**counts)

    def _take_one(self, batch: BatchMessage, message: ReportMessage, worker_at: WorkerAt) -> str | None:
        awaited = self._recorder.awaited.find(message.plan_id)
        if awaited is None:
            return None
        if message.revision <= awaited.revision:
            return "duplicate"
        first, awaited.revision = awaited.revision < 0, message.revision
        report = plan_report(batch, message, worker_at)
        self._recorder.amend(awaited, report)
        newly_evicted = report.evicted_before_reuse_blocks - awaited.evicted_blocks
        awaited.evicted_blocks = max(report.evicted_before_reuse_blocks, awaited.evicted_blocks)
        if self._fleet.get(awaited.worker) is not None:
            self._metrics.evicted(awaited.worker, newly_evicted)
        if first:
            self._learn(awaited, report)
        return "joined" if first else "revised"

    def _learn(self, awaited: Awaited, report: PlanReport) -> None:
        """A revision says more of evictions only, so all else is learnt from the first."""
        now_s = self._monotonic_s()
        workers = {status.spec.id for status in self._fleet.statuses()}
        self._metrics.reported(report, workers)
        of_peers = peer_shares(report, report.block_tokens)
        self._recorder.awaited.reported(awaited, {k: v for k, v in of_peers.items() if k in workers}, now_s)
        facts = awaited.facts
        if self._calibration is None or facts is None or facts.worker not in workers:
            return
        observed = awaited.observed
        blamed = observed.cached_tokens is not None and observed.ttft_s is not None
        for pull in pull_observations(facts, report, blamed=blamed):
            if pull.source in workers and pull.source != facts.worker:
                self._calibration.observe_pull(pull, now_s)
        for tier in tier_observations(facts, report):
            self._calibration.observe_tier(tier, now_s)

    def _count_dropped(self, batch: BatchMessage) -> None:
        """Engines tell the total since they began, so that a repeated batch counts once."""
        known = self._dropped.get(batch.engine, 0)
        self._dropped[batch.engine] = max(batch.dropped, known)
        self._dropped.move_to_end(batch.engine)
        if len(self._dropped) > _MOST_ENGINES:
            self._dropped.popitem(last=False)
        if batch.dropped > known:
            self._metrics.reports.labels("dropped").inc(batch.dropped - known)


def addresses(fleet: Fleet) -> WorkerAt:
    """Who answers at the addresses that plans name: that of rank 0 as configured, ranks after it at the next ports."""
    table: dict[str, str] = {}
    for status in fleet.statuses():
        for rank in range(status.spec.ranks):
            for address in _addresses(status.spec, rank):
                table.setdefault(address, status.spec.id)
    return table.get


def _addresses(spec: WorkerSpec, rank: int) -> list[str]:
    found = []
    for address in (spec.p2p, spec.extension):
        host, port = rank_address(address, rank)
        found += [address_text(host, port), f"{host}:{port}"] if port else []
    return found
