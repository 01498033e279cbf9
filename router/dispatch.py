# SPDX-License-Identifier: Apache-2.0
"""The life of one attempt: token ids, decision, promise on the load board, record, outcome.

Implements ``router.gateway.routing.Dispatcher``. Runs on one event loop; the only awaits are tokenisation.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from indexer.identity import Namespace
from router.costs.calibration import Calibration
from router.decisions.log import DecisionLog
from router.decisions.record import DecisionRecord, make_record, path_text
from router.errors import (
    EncodingRefused,
    FallbackReason,
    NoWorkerAvailable,
    TokensUnavailable,
    TransferParamsRefused,
)
from router.fleet.fleet import Fleet
from router.fleet.worker import WorkerStatus
from router.gateway.parse import is_wide_json
from router.gateway.routing import Attempt, Route
from router.metrics import RouterMetrics
from router.plan.candidate import Plan
from router.plan.decider import Decider, Decision, Prompts
from router.plan.load import LoadBoard
from router.plan.observed import observation
from router.plan.transfer_params import transfer_params
from router.request import InferenceRequest, Outcome, RequestKind, Usage
from router.tokens.service import TokenService

_log = logging.getLogger(__name__)

_SILENT_AFTER_PROMPTS = 5  # prompts that must have made new blocks, answered without a single event
_BYTES_PER_TOKEN = 5  # of a JSON body with English text; only weighs load where the tokens are unknown


@dataclass(frozen=True, slots=True)
class Clocks:
    """Time and chance, handed in so that tests own them."""

    monotonic_s: Callable[[], float]
    unix_s: Callable[[], float]
    random: Random


@dataclass(frozen=True, slots=True)
class _Read:
    """What could be learnt of the prompts of a request."""

    prompts: Prompts | None
    tokens_from: str | None
    fallback: FallbackReason | None


class RequestDispatcher:
    """Chooses a worker for each attempt and follows it to its end."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        tokens: TokenService,
        decider: Decider,
        board: LoadBoard,
        log: DecisionLog,
        metrics: RouterMetrics,
        clocks: Clocks,
        trust_transfer_params: bool,
        calibration: Calibration | None = None,
    ) -> None:
        self._fleet = fleet
        self._tokens = tokens
        self._decider = decider
        self._board = board
        self._log = log
        self._metrics = metrics
        self._clocks = clocks
        self._trust_transfer_params = trust_transfer_params
        self._calibration = calibration
        self._block_makers: dict[str, deque[float]] = {}
        """By worker: when its newest answered prompts were sent that must have made new blocks."""

    async def dispatch(self, request: InferenceRequest, tried: frozenset[str]) -> Attempt:
        given = self._given_params(request)
        read = await self._read(request)
        candidates = self._candidates(request, tried)
        now_s = self._clocks.monotonic_s()
        decision = self._decide(request, read, candidates, now_s)
        self._metrics.decision_s.observe(self._clocks.monotonic_s() - now_s)
        plan = decision.planned.chosen
        # A fresh id for each attempt: an engine that sees one twice breaks the session.
        params = None if given else transfer_params(plan, f"pm-{uuid.uuid4().hex}")
        ticket = self._board.promise(
            plan.worker,
            plan.dp_rank,
            plan.terms.prefill_s,
            plan.terms.total_s,
            now_s,
            plan.source.worker if plan.source else None,
            observable=request.stream,
        )
        record = self._record(request, read, decision, params, attempt=len(tried) + 1)
        self._log.add(record)
        self._count(record)
        attempt = RoutedAttempt(
            self, request, self._route(request, decision, record, params), record, ticket, now_s
        )
        if self._calibration is not None and not given and read.prompts and len(read.prompts.token_ids) == 1:
            attempt.followed = plan
        return attempt

    async def explain(self, request: InferenceRequest) -> DecisionRecord:
        """The decision that ``dispatch`` would make now; nothing is sent, promised or kept."""
        given = self._given_params(request)
        read = await self._read(request)
        candidates = self._candidates(request, frozenset(), dry_run=True)
        decision = self._decide(request, read, candidates, self._clocks.monotonic_s())
        params = None if given else transfer_params(decision.planned.chosen, "pm-dry-run")
        return self._record(request, read, decision, params, attempt=1)

    def _given_params(self, request: InferenceRequest) -> bool:
        if request.document is None and is_wide_json(request.body):
            raise EncodingRefused("a JSON body must be UTF-8 (RFC 8259)")
        given = request.document is not None and request.document.get("kv_transfer_params") is not None
        if given and not self._trust_transfer_params:
            raise TransferParamsRefused(
                "kv_transfer_params can point a worker at any host; "
                "they are taken only where gateway.trust_transfer_params is set"
            )
        return given

    def _candidates(
        self, request: InferenceRequest, tried: frozenset[str], *, dry_run: bool = False
    ) -> Sequence[WorkerStatus]:
        now_s = self._clocks.monotonic_s()
        candidates = self._fleet.candidates(request.model, now_s, tried, dry_run=dry_run)
        if not candidates:
            reason = self._fleet.unavailable_reason(request.model, tried)
            self._metrics.refused.labels(reason).inc()
            raise NoWorkerAvailable(reason)
        return candidates

    async def _read(self, request: InferenceRequest) -> _Read:
        if request.kind is RequestKind.OTHER:
            return _Read(None, None, FallbackReason.UNKNOWN_PATH)
        if not self._decider.policy.looks_at_index:
            return _Read(None, None, FallbackReason.POLICY)
        if request.document is None:
            return _Read(None, None, FallbackReason.UNPARSABLE_BODY)
        started_s = self._clocks.monotonic_s()
        try:
            tokens = await self._tokens.tokenize(request)
        except TokensUnavailable as error:
            return _Read(None, None, error.reason)
        except Exception:
            # A request that we cannot read may well be one that the engine can.
            _log.exception("request %s could not be tokenised", request.request_id)
            return _Read(None, None, FallbackReason.TOKENIZER_ERROR)
        self._metrics.tokenize_s.observe(self._clocks.monotonic_s() - started_s)
        prompts = Prompts(
            token_ids=tokens.prompts,
            namespace=self._namespace(request.model),
            cache_salt=request.cache_salt,
            single_sequence=request.sequences == 1 and len(tokens.prompts) == 1,
        )
        return _Read(prompts, tokens.source.value, None)

    def _namespace(self, model: str | None) -> Namespace:
        if model is None:  # vLLM serves its first model then
            models = (info for status in self._fleet.statuses() for info in status.models.values())
            info = next(models, None)
        else:
            info = self._fleet.model_info(model)
        return Namespace(info.base, info.lora) if info is not None else Namespace(model or "")

    def _decide(
        self, request: InferenceRequest, read: _Read, candidates: Sequence[WorkerStatus], now_s: float
    ) -> Decision:
        return self._decider.decide(
            read.prompts,
            candidates,
            self._fleet.statuses(),
            now_s,
            self._clocks.random,
            pinned_rank=request.dp_rank,
            estimated_tokens=len(request.body) // _BYTES_PER_TOKEN,
        )

    def _record(
        self,
        request: InferenceRequest,
        read: _Read,
        decision: Decision,
        params: dict[str, object] | None,
        attempt: int,
    ) -> DecisionRecord:
        fallback = read.fallback
        if fallback is None and not decision.indexed:
            fallback = FallbackReason.NO_INDEX
        return make_record(
            request_id=request.request_id,
            attempt=attempt,
            time_unix_s=self._clocks.unix_s(),
            model=request.model,
            policy=self._decider.policy.name,
            prompt_tokens=read.prompts.tokens if read.prompts else 0,
            decision=decision,
            tokens_from=read.tokens_from,
            transfer_params=params,
            fallback=fallback,
        )

    def _route(
        self,
        request: InferenceRequest,
        decision: Decision,
        record: DecisionRecord,
        params: dict[str, object] | None,
    ) -> Route:
        plan = decision.planned.chosen
        status = self._fleet.get(plan.worker)
        if status is None:
            raise NoWorkerAvailable("no_workers")
        upstream = [(b"x-request-id", request.request_id.encode())]
        if status.spec.ranks > 1:
            upstream.append((b"x-data-parallel-rank", str(plan.dp_rank).encode()))
        response = [
            (b"x-request-id", request.request_id.encode()),
            (b"x-pointsman-worker", plan.worker.encode()),
        ]
        if record.path_blocks and record.prompt_tokens:
            response.append((b"x-pointsman-path", path_text(record.path_blocks).encode()))
        if record.fallback:
            response.append((b"x-pointsman-fallback", record.fallback.encode()))
        return Route(
            request_id=request.request_id,
            worker_id=plan.worker,
            base_url=status.spec.url,
            insert={"kv_transfer_params": params} if params else {},
            upstream_headers=tuple(upstream),
            response_headers=tuple(response),
        )

    def _count(self, record: DecisionRecord) -> None:
        self._metrics.decisions.labels(record.policy).inc()
        if record.fallback:
            self._metrics.fallbacks.labels(record.fallback).inc()
        if record.prompt_tokens:
            for path, blocks in record.path_blocks.items():
                self._metrics.path_blocks.labels(path).inc(blocks)

    def first_byte(self, attempt: RoutedAttempt) -> None:
        """A streamed answer has begun: the prefill is done."""
        now_s = self._clocks.monotonic_s()
        if not attempt.request.stream:
            return
        self._board.first_token(attempt.ticket, now_s)
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
        seen = observation(plan, attempt.record.prompt_tokens, cached_tokens, ttft_s)
        self._calibration.observe(seen, self._clocks.monotonic_s())

    def finished(self, attempt: RoutedAttempt, outcome: Outcome, status: int | None) -> None:
        """The attempt is over: its load is released and its outcome known."""
        now_s = self._clocks.monotonic_s()
        self._board.release(attempt.ticket, now_s)
        self._fleet.record_outcome(attempt.record.worker, outcome, now_s)
        self._metrics.attempts.labels(attempt.record.worker, outcome.value).inc()
        observed = attempt.record.observed
        observed.outcome, observed.status = outcome.value, status
        observed.duration_s = now_s - attempt.started_s
        record = attempt.record
        if outcome is Outcome.OK and record.tokens_from and record.path_blocks.get("recompute", 0) > 1:
            sent = self._block_makers.setdefault(record.worker, deque(maxlen=_SILENT_AFTER_PROMPTS))
            sent.append(attempt.started_s)

    def is_silent(self, worker: str, heard_at_s: float) -> bool:
        """Whether a worker has answered prompts without publishing events since ``heard_at_s``."""
        sent = self._block_makers.get(worker, ())
        return len(sent) == _SILENT_AFTER_PROMPTS and min(sent) > heard_at_s

    def forget(self, worker: str) -> None:
        """The worker left the fleet."""
        self._block_makers.pop(worker, None)


class RoutedAttempt:
    """One attempt as the gateway sees it."""

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        request: InferenceRequest,
        route: Route,
        record: DecisionRecord,
        ticket: int,
        started_s: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._route = route
        self._begun = False
        self._over = False
        self.request = request
        self.record = record
        self.ticket = ticket
        self.started_s = started_s
        self.followed: Plan | None = None
        """The plan that calibration may learn from, until it has."""

    @property
    def route(self) -> Route:
        return self._route

    def first_byte(self) -> None:
        if not self._begun and not self._over:
            self._begun = True
            self._dispatcher.first_byte(self)

    def usage(self, usage: Usage) -> None:
        self._dispatcher.joined(self, usage)

    def finish(self, outcome: Outcome, status: int | None) -> None:
        if not self._over:
            self._over = True
            self._dispatcher.finished(self, outcome, status)
