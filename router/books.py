# SPDX-License-Identifier: Apache-2.0
"""What a decision leaves behind: load on the board, its record, counts, and blocks on a map without events."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.decisions.record import DecisionRecord, make_record
from router.errors import FallbackReason
from router.fleet.fleet import Fleet
from router.map_sources import Maps
from router.metrics import RouterMetrics
from router.plan.candidate import Plan
from router.plan.decider import Decision
from router.plan.load import Board
from router.reading import Reading
from router.request import InferenceRequest


class Books:
    """Where decisions are entered. Nothing here waits: what a decision saw is still so when it is entered."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        board: Board,
        metrics: RouterMetrics,
        policy: str,
        unix_s: Callable[[], float],
        maps: Maps | None,
    ) -> None:
        """``policy``: the name that records and counts bear. ``maps`` None: all maps come from events."""
        self._fleet = fleet
        self._board = board
        self._metrics = metrics
        self._policy = policy
        self._unix_s = unix_s
        self._maps = maps

    def promise(
        self, request: InferenceRequest, read: Reading, plan: Plan, decision: Decision, now_s: float
    ) -> int:
        """The plan's load, counted from ``now_s`` (monotonic). The ticket to release it with."""
        return self._board.promise(
            plan.worker,
            plan.dp_rank,
            plan.terms.prefill_s,
            plan.terms.total_s,
            now_s,
            _feeders(plan),
            observable=request.stream,
            prompt_tokens=read.prompt_tokens,
            missing_tokens=max(read.prompt_tokens - plan.cached_tokens, 1) if read.prompts else 0,
            resident=decision.resident(plan),
        )

    def sent(self, plan: Plan, read: Reading) -> None:
        """Where no events will tell, what is known is that these prompts went there."""
        if self._maps is None or read.prompts is None:
            return
        for one in (plan, plan.handover.prefill if plan.handover is not None else None):
            status = self._fleet.get(one.worker) if one is not None else None
            if one is not None and status is not None:
                self._maps.sent(status, one.dp_rank, read.prompts)

    def record(
        self,
        request: InferenceRequest,
        read: Reading,
        decision: Decision,
        params: Mapping[str, object] | None,
        attempt: int,
    ) -> DecisionRecord:
        """The record of a decision that nothing is known of yet but itself."""
        fallback = read.fallback
        if fallback is None and not decision.indexed:
            fallback = FallbackReason.NO_INDEX
        record = make_record(
            request_id=request.request_id,
            attempt=attempt,
            time_unix_s=self._unix_s(),
            model=request.model,
            policy=self._policy,
            prompt_tokens=read.prompt_tokens,
            decision=decision,
            tokens_from=read.tokens_from,
            transfer_params=params,
            fallback=fallback,
            tenant=request.tenant.name,
            priority=request.priority,
            slo_ttft_s=request.slo_ttft_s,
            slo_tpot_s=request.slo_tpot_s,
        )
        if self._maps is not None and read.prompts is not None:
            record.map_source = self._maps.of(record.worker, record.dp_rank)
        return record

    def count(self, record: DecisionRecord) -> None:
        """In the metrics."""
        self._metrics.decisions.labels(record.policy).inc()
        if record.fallback:
            self._metrics.fallbacks.labels(record.fallback).inc()
        if record.prompt_tokens:
            for path, blocks in record.path_blocks.items():
                self._metrics.path_blocks.labels(path).inc(blocks)


def _feeders(plan: Plan) -> tuple[str, ...]:
    """The workers whose links the plan's blocks cross."""
    if plan.handover is not None:
        return (plan.handover.prefill.worker,)
    return plan.source_workers
