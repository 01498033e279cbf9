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
from router.decisions.record import DecisionRecord
from router.decisions.report import PlanReport
from router.decisions.trust import Trust, blame
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
    _rows: ConstantsRows = field(init=False)
    _waiting: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = ConstantsRows(self.priced_with.costs)

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
        self.judge(tracked.plan, observed.cached_tokens, now_s)
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

    def judge(self, plan: Plan, cached_tokens: int, now_s: float) -> None:
        """A plan was followed, and the engine found so many tokens cached: who kept what was promised."""
        pulled = plan.path_blocks.get("peer", 0) * plan.block_size_tokens if plan.source else 0
        own = plan.cached_tokens - pulled
        of_source, of_worker = blame(max(plan.cached_tokens - cached_tokens, 0), pulled)
        self.trust.observe(plan.worker, own, own - of_worker, now_s)
        if plan.source is not None:
            self.trust.observe(plan.source.worker, pulled, pulled - of_source, now_s)

    def finished(self, tracked: Tracked) -> None:
        """The attempt is over and ``record.observed`` is final."""
        self._later(lambda: self._write_outcome(tracked))

    def reported(self, request_id: str, attempt: int, report: PlanReport) -> bool:
        """An engine extension tells what became of a plan; False where the record is not kept any more."""
        record = self.log.find(request_id, attempt)
        if record is None:
            return False
        record.observed.tiers, record.observed.report = dict(report.tiers), report
        if self.writer is not None:
            self.flush()
            self.writer.write(outcome_line(record, self.unix_s()))
        return True

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
        one_prompt = decision.question is not None and len(decision.question.prompt_tokens) == 1
        if tracked.followed and one_prompt and record.tokens_from is not None and record.prefill is None:
            tracked.alternatives = alternatives(kept, decision.planned.ranking)
        if self.writer is not None:
            self.writer.write(decision_line(record))

    def _write_outcome(self, tracked: Tracked) -> None:
        record, observed = tracked.record, tracked.record.observed
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


def read_inputs(record: DecisionRecord) -> DecisionInputs | None:
    """The inputs of a record, where it has them."""
    return _inputs_decoder.decode(record.inputs) if isinstance(record.inputs, msgspec.Raw) else None
