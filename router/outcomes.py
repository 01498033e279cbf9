# SPDX-License-Identifier: Apache-2.0
"""The rest of an attempt: what is learnt and released when its answer begins, is counted, and ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.costs.calibration import Calibration
from router.decisions.recorder import DecisionRecorder, Tracked
from router.elsewhere import Elsewhere
from router.fleet.fleet import Fleet
from router.gateway.routing import Attempt, Route
from router.legs import OpenLeg, PrefillLegs
from router.metrics import RouterMetrics
from router.plan.candidate import Plan
from router.plan.load import Board
from router.plan.observed import Decoding, begin_decoding, decode_observation, observation, teaches
from router.plan.tails import TailReuse
from router.reading import RequestReader
from router.request import InferenceRequest, Outcome, RequestKind, Usage
from router.silence import BlockMakers
from router.waiting import WaitingRoom


class Outcomes:
    """Follows attempts to their ends. Every promise on the load board is released once, however an attempt ends."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        reader: RequestReader,
        board: Board,
        recorder: DecisionRecorder,
        metrics: RouterMetrics,
        monotonic_s: Callable[[], float],
        legs: PrefillLegs,
        calibration: Calibration | None,
        room: WaitingRoom | None,
        tails: TailReuse | None,
        block_makers: BlockMakers | None = None,
    ) -> None:
        self._fleet = fleet
        self._reader = reader
        self._board = board
        self._recorder = recorder
        self._metrics = metrics
        self._monotonic_s = monotonic_s
        self._legs = legs
        self._calibration = calibration
        self._room = room
        self._tails = tails
        self.block_makers = block_makers or BlockMakers()

    def first_byte(self, attempt: RoutedAttempt) -> None:
        """A streamed answer has begun: the prefill is done."""
        now_s = self._monotonic_s()
        if not attempt.request.stream:
            return
        self._board.first_token(attempt.ticket, now_s)
        if self._room is not None:
            self._room.freed(attempt.record.worker)
        attempt.decoding = begin_decoding(self._board, attempt.record.worker, attempt.record.dp_rank, now_s)
        attempt.record.observed.ttft_s = now_s - attempt.started_s
        self._metrics.ttft_s.labels(attempt.record.worker).observe(now_s - attempt.started_s)

    def joined(self, attempt: RoutedAttempt, usage: Usage) -> None:
        """The engine's own counts: compare them with what was promised."""
        record, observed = attempt.record, attempt.record.observed
        observed.prompt_tokens = usage.prompt_tokens
        observed.completion_tokens = usage.completion_tokens
        observed.cached_tokens = usage.cached_tokens
        if usage.cached_tokens is None or record.tokens_from is None:
            return
        self._recorder.joined(attempt.tracked, self._monotonic_s())
        if attempt.request.sequences == 1:
            self._reader.answers.note(attempt.request.model, usage.completion_tokens)
            if self._tails is not None and record.reachable_cached_tokens is not None:
                self._tails.note(kind_of(attempt.request), record.reachable_cached_tokens)
        self._learn(attempt, usage.cached_tokens)
        lost = max(record.predicted_cached_tokens - usage.cached_tokens, 0)
        observed.stale = lost > 0
        self._metrics.predicted_cached_tokens.inc(record.predicted_cached_tokens)
        self._metrics.observed_cached_tokens.inc(usage.cached_tokens)
        if lost:
            self._metrics.stale_decisions.labels(record.worker).inc()
            self._metrics.stale_tokens.labels(record.worker).inc(lost)

    def _learn(self, attempt: RoutedAttempt, cached_tokens: int) -> None:
        """Only where the time of the first token is known: the answer was streamed."""
        ttft_s, plan = attempt.record.observed.ttft_s, attempt.followed
        if self._calibration is None or plan is None or ttft_s is None:
            return
        attempt.followed = None
        if not teaches(plan):
            return
        seen = observation(plan, attempt.record.prompt_tokens, cached_tokens, ttft_s)
        self._calibration.observe(seen, self._monotonic_s())

    def _learn_decode(self, attempt: RoutedAttempt, now_s: float) -> None:
        """Only of one sequence: the tokens of several are counted together."""
        tokens, begun = attempt.record.observed.completion_tokens, attempt.decoding
        if self._calibration is None or begun is None or not tokens or attempt.request.sequences != 1:
            return
        seen = decode_observation(
            self._board, attempt.record.worker, attempt.record.dp_rank, begun, tokens, now_s
        )
        self._calibration.observe_decode(seen, now_s)

    def prefill_finished(
        self, attempt: RoutedAttempt, outcome: Outcome, status: int | None, usage: Usage | None
    ) -> None:
        """The prefill leg of a split request is over."""
        leg = attempt.leg
        if leg is None or leg.over:
            return
        self._recorder.flush()
        now_s = self._monotonic_s()
        self._legs.close(leg, outcome, status, usage, now_s)
        if usage is not None and usage.cached_tokens is not None:
            self._recorder.judge(leg.handover.prefill, usage.cached_tokens, now_s, leg.record.plan_id)
        if self._room is not None:
            self._room.freed(leg.record.worker)
        if outcome is Outcome.OK:
            self.block_makers.answered(leg.record.worker, leg.record.path_blocks, leg.started_s)

    def finished(self, attempt: RoutedAttempt, outcome: Outcome, status: int | None) -> None:
        """The attempt is over: its load is released and its outcome known."""
        self.prefill_finished(attempt, Outcome.CANCELLED, None, None)
        self._recorder.flush()
        now_s = self._monotonic_s()
        if outcome is Outcome.OK:
            self._learn_decode(attempt, now_s)
        self._board.release(attempt.ticket, now_s)
        if self._room is not None:
            self._room.ended(attempt.request.tenant, attempt.record.worker)
        self._fleet.record_outcome(attempt.record.worker, outcome, now_s)
        self._metrics.attempts.labels(attempt.record.worker, outcome.value).inc()
        observed = attempt.record.observed
        observed.outcome, observed.status = outcome.value, status
        observed.duration_s = now_s - attempt.started_s
        self._recorder.finished(attempt.tracked)
        record = attempt.record
        if record.tokens_from and outcome is Outcome.OK:
            self.block_makers.answered(record.worker, record.path_blocks, attempt.started_s)


class RoutedAttempt:
    """One attempt as the gateway sees it."""

    def __init__(
        self,
        outcomes: Outcomes,
        request: InferenceRequest,
        route: Route,
        tracked: Tracked,
        ticket: int,
        started_s: float,
        leg: OpenLeg | None = None,
    ) -> None:
        self._outcomes = outcomes
        self._route = route
        self._begun = False
        self._over = False
        self.request = request
        self.record = tracked.record
        self.tracked = tracked
        self.ticket = ticket
        self.started_s = started_s
        self.leg = leg
        self.followed: Plan | None = None
        """The plan that calibration may learn from, until it has."""
        self.decoding: Decoding | None = None
        """How its rank was when a streamed answer began."""
        self.elsewhere: Elsewhere | None = None
        """Where a proxy that sends the request could take it."""

    @property
    def route(self) -> Route:
        return self._route

    def first_byte(self) -> None:
        if not self._begun and not self._over:
            self._begun = True
            self._outcomes.first_byte(self)

    def usage(self, usage: Usage) -> None:
        self._outcomes.joined(self, usage)

    def prefill_finished(self, outcome: Outcome, status: int | None, usage: Usage | None) -> None:
        self._outcomes.prefill_finished(self, outcome, status, usage)

    def finish(self, outcome: Outcome, status: int | None) -> None:
        if not self._over:
            self._over = True
            self.elsewhere = None
            self._outcomes.finished(self, outcome, status)

    def fallbacks(self, most: int) -> tuple[str, ...]:
        return self.elsewhere.fallbacks(most) if self.elsewhere is not None else ()

    def scores_s(self) -> Mapping[str, float]:
        return self.elsewhere.scores_s() if self.elsewhere is not None else {}

    def served_by(self, worker_id: str) -> Attempt | None:
        if worker_id == self._route.worker_id:
            return self
        elsewhere = self.elsewhere
        other = elsewhere.begin_at(worker_id) if elsewhere is not None else None
        if other is not None:
            # The proxy tries them in their order: it could not connect here.
            self.finish(Outcome.WORKER_ERROR, None)
        return other


def kind_of(request: InferenceRequest) -> tuple[str, str | None, RequestKind]:
    """Requests whose prompts are made alike."""
    return request.tenant.name, request.model, request.kind
