# SPDX-License-Identifier: Apache-2.0
"""Follows a decision from its record to its outcome: the ring in memory, the log, trust, lost tokens, regret.

What a request waits for is only ``decided``, which appends to a list. The inputs are put together and the lines
written as soon as the event loop is free, when the request is on its way. They hold the constants that the decision
was made with, so ``flush`` must run before anything is learnt; the dispatcher sees to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from router.costs.model import Costs
from router.decisions.constants import ConstantsRows
from router.decisions.hindsight import Alternative, alternatives, regret_s
from router.decisions.inputs import DecisionInputs, PlanSettings, best_candidates, inputs_of
from router.decisions.lines import decision_line, outcome_line
from router.decisions.log import DecisionLog
from router.decisions.log_writer import LogWriter
from router.decisions.lost import lost_tokens, reach_tokens
from router.decisions.record import DecisionRecord, Observation
from router.decisions.report import PlanReport
from router.decisions.reports_awaited import Awaited, AwaitedPlans
from router.decisions.reports_evidence import facts_of, tiers_with_total
from router.decisions.trust import Trust
from router.metrics import RouterMetrics
from router.plan.candidate import Candidate, Plan
from router.plan.decider import Decision

_log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_inputs_decoder = msgspec.json.Decoder(DecisionInputs)


@dataclass(frozen=True, slots=True)
class PricedWith:
    """What decisions are priced with."""

    costs: Costs
    constants: str
    """Id of the constants that ``costs`` started from."""
    settings: PlanSettings


@dataclass(slots=True)
class Tracked:
    """A decision whose outcome is awaited."""

    record: DecisionRecord
    plan: Plan
    followed: bool
    """The engine was to carry out the plan; False where the client gave parameters of its own, or wants all computed."""
    decision: Decision | None
    """Until its inputs are put together."""
    alternatives: tuple[Alternative, ...] = ()
    """Empty where regret cannot be told."""


@dataclass(slots=True)
class DecisionRecorder:
    """Runs on the event loop; no call blocks."""

    log: DecisionLog
    priced_with: PricedWith
    trust: Trust
    metrics: RouterMetrics
    unix_s: Callable[[], float]
    writer: LogWriter | None = None
    """None: nothing is written to disk."""
    awaited: AwaitedPlans = field(init=False)
    """Plans of which engine extensions may still report."""
    _rows: ConstantsRows = field(init=False)
    _waiting: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = ConstantsRows(self.priced_with.costs)
        self.awaited = AwaitedPlans(self.log.capacity, self.trust)

    def decided(self, record: DecisionRecord, decision: Decision, *, followed: bool) -> Tracked:
        """Keep a record; its inputs and its line follow when the loop is free."""
        tracked = Tracked(record, decision.planned.chosen, followed, decision)
        self.log.add(record)
        self._later(lambda: self._write_decision(tracked))
        return tracked

    def complete(self, record: DecisionRecord, decision: Decision) -> Sequence[Candidate]:
        """Give a record its inputs; returns the candidates that are kept, in the order of the ranking."""
        question = decision.question
        record.constants = self.priced_with.constants
        if question is None:
            return ()
        kept = best_candidates(question, decision.planned.ranking)
        if kept:
            record.speculative_tokens = kept[0].speculative_tokens
        settings, prefillers = self.priced_with.settings, len(decision.prefillers)
        record.inputs = msgspec.Raw(_encode(inputs_of(question, kept, self._rows, settings, prefillers)))
        if record.tokens_from is not None:
            record.reachable_cached_tokens = reach_tokens(question, record.predicted_cached_tokens)
        return kept

    def flush(self) -> None:
        """Do what waits for the loop to be free."""
        waiting, self._waiting = self._waiting, []
        for do in waiting:
            try:
                do()
            except Exception:
                # What explains the service must not stop it.
                _log.exception("a decision could not be recorded")

    def joined(self, tracked: Tracked, now_s: float) -> None:
        """The engine's counts are in ``record.observed``: what became of the promised tokens."""
        self.flush()
        record, observed = tracked.record, tracked.record.observed
        if observed.cached_tokens is None or record.tokens_from is None:
            return
        if not tracked.followed or record.prefill is not None:
            return  # of a split request the prefill leg tells what was cached
        self.judge(tracked.plan, observed.cached_tokens, now_s, record.plan_id)
        reach = record.reachable_cached_tokens
        if reach is None or observed.prompt_tokens != record.prompt_tokens:
            return
        lost = lost_tokens(
            record.prompt_tokens, reach, record.predicted_cached_tokens, observed.cached_tokens
        )
        observed.lost_workload, observed.lost_routing, observed.lost_stale = lost
        for kind, tokens in zip(lost._fields, lost, strict=True):
            if tokens:
                self.metrics.lost_tokens.labels(kind).inc(tokens)

    def judge(self, plan: Plan, cached_tokens: int, now_s: float, plan_id: str = "") -> None:
        """A plan was followed, and the engine found so many tokens cached: who kept what was promised."""
        self.awaited.counted(plan_id, facts_of(plan), cached_tokens, now_s)

    def finished(self, tracked: Tracked) -> None:
        """The attempt is over and ``record.observed`` is final."""
        self._later(lambda: self._write_outcome(tracked))

    def reported(self, request_id: str, attempt: int, report: PlanReport) -> bool:
        """An engine extension tells what became of a plan; False where the record is not kept any more."""
        record = self.log.find(request_id, attempt)
        if record is None:
            return False
        self.amend(Awaited(record), report)
        return True

    def amend(self, awaited: Awaited, report: PlanReport) -> None:
        """Join a report to its record, and to the log where the attempt is over: its outcome will have it otherwise."""
        observed = awaited.observed
        observed.report = report
        _join(observed)
        if self.writer is not None and awaited.record.observed.outcome is not None:
            self.flush()
            self.writer.write(outcome_line(awaited.record, self.unix_s()))

    def _later(self, do: Callable[[], None]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append(do)

    def _write_decision(self, tracked: Tracked) -> None:
        record, decision = tracked.record, tracked.decision
        if decision is None:
            return
        tracked.decision = None
        kept = self.complete(record, decision)
        self._await_reports(tracked)
        one_prompt = decision.question is not None and len(decision.question.prompt_tokens) == 1
        if tracked.followed and one_prompt and record.tokens_from is not None and record.prefill is None:
            tracked.alternatives = alternatives(kept, decision.planned.ranking)
        if self.writer is not None:
            self.writer.write(decision_line(record))

    def _await_reports(self, tracked: Tracked) -> None:
        record, plan, leg = tracked.record, tracked.plan, tracked.record.prefill
        if record.plan_id:
            followed = tracked.followed and record.tokens_from is not None and leg is None
            self.awaited.expect(record.plan_id, Awaited(record, None, facts_of(plan) if followed else None))
        if leg is not None and leg.plan_id and plan.handover is not None:
            self.awaited.expect(leg.plan_id, Awaited(record, leg, facts_of(plan.handover.prefill)))

    def _write_outcome(self, tracked: Tracked) -> None:
        record, observed = tracked.record, tracked.record.observed
        _join(observed)
        if tracked.alternatives and observed.ttft_s is not None and observed.cached_tokens is not None:
            observed.regret_s = regret_s(
                tracked.alternatives,
                record.prompt_tokens,
                observed.cached_tokens,
                observed.ttft_s,
                self.priced_with.costs,
            )
            self.metrics.regret_s.observe(observed.regret_s)
        tracked.alternatives = ()
        if self.writer is not None:
            self.writer.write(outcome_line(record, self.unix_s()))


def _join(observed: Observation) -> None:
    """What a report and the engine's total say together."""
    report = observed.report
    if report is not None:
        observed.tiers = tiers_with_total(report, observed.cached_tokens)
        observed.stale = report.stale or observed.stale


def read_inputs(record: DecisionRecord) -> DecisionInputs | None:
    """The inputs of a record, where it has them."""
    return _inputs_decoder.decode(record.inputs) if isinstance(record.inputs, msgspec.Raw) else None
