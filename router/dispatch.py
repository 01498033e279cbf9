# SPDX-License-Identifier: Apache-2.0
"""The beginning of an attempt: reading, decision, promise on the load board, record. Its outcome: ``router.outcomes``.

Implements ``router.gateway.routing.Dispatcher``. Runs on one event loop; the only awaits are tokenisation and, where
everything is saturated, the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from router.books import Books
from router.costs.calibration import Calibration
from router.decisions.record import DecisionRecord, prefill_record
from router.decisions.recorder import DecisionRecorder
from router.elsewhere import Elsewhere
from router.errors import NoWorkerAvailable
from router.fleet.fleet import Fleet
from router.fleet.worker import WorkerStatus
from router.gateway.routing import Attempt
from router.legs import PrefillLegs, new_transfer_id
from router.map_sources import Maps
from router.metrics import RouterMetrics
from router.outcomes import Outcomes, RoutedAttempt, kind_of
from router.participants import Participants
from router.plan.candidate import Plan
from router.plan.decider import Decider, Decision
from router.plan.extension_plan import ExtensionTerms
from router.plan.load import Board
from router.plan.tails import TailReuse
from router.plan.transfer_params import prefill_params, transfer_params
from router.plan.worth import Appraiser
from router.reading import Reading, RequestReader
from router.request import InferenceRequest
from router.routes import make_route
from router.silence import BlockMakers
from router.waiting import WaitingRoom

_BYTES_PER_TOKEN = 5  # of a JSON body with English text; only weighs load where the tokens are unknown


@dataclass(frozen=True, slots=True)
class Clocks:
    """Time and chance, handed in so that tests own them."""

    monotonic_s: Callable[[], float]
    unix_s: Callable[[], float]
    random: Random


class RequestDispatcher:
    """Chooses a worker for each attempt and follows it to its end."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        reader: RequestReader,
        decider: Decider,
        board: Board,
        recorder: DecisionRecorder,
        metrics: RouterMetrics,
        clocks: Clocks,
        calibration: Calibration | None = None,
        room: WaitingRoom | None = None,
        tails: TailReuse | None = None,
        limit_offload: bool = True,
        appraiser: Appraiser | None = None,
        block_makers: BlockMakers | None = None,
        maps: Maps | None = None,
    ) -> None:
        """``room`` None: nothing waits, nothing is shed. ``tails`` None, or not ``limit_offload``: every block may be
        offloaded. ``appraiser`` None: workers with our extension are told nothing but their pulls. ``maps`` None: all
        maps come from events.
        """
        self._fleet = fleet
        self._reader = reader
        self._decider = decider
        self._recorder = recorder
        self._metrics = metrics
        self._clocks = clocks
        self._calibration = calibration
        self._room = room
        self._tails = tails
        self._limit_offload = limit_offload
        self._appraiser = appraiser
        self._books = Books(
            fleet=fleet,
            board=board,
            metrics=metrics,
            policy=decider.policy.name,
            unix_s=clocks.unix_s,
            maps=maps,
        )
        self._participants = Participants(fleet, metrics, clocks.monotonic_s)
        self._legs = PrefillLegs(fleet, board, metrics, calibration)
        self._outcomes = Outcomes(
            fleet=fleet,
            reader=reader,
            board=board,
            recorder=recorder,
            metrics=metrics,
            monotonic_s=clocks.monotonic_s,
            legs=self._legs,
            calibration=calibration,
            room=room,
            tails=tails,
            block_makers=block_makers,
        )
        self.block_makers = self._outcomes.block_makers
        self.behind_proxy = False
        """Another process sends the requests, and may fall back by itself."""

    async def dispatch(
        self, request: InferenceRequest, tried: frozenset[str], allowed: frozenset[str] | None = None
    ) -> Attempt:
        given = self._reader.gives_params(request)
        read = await self._reader.read(request)
        attempt, decision = self._try_now(request, read, given, tried, allowed)
        if attempt is not None:
            return attempt
        room = self._room
        assert room is not None  # noqa: S101 - without one nothing waits

        def start(waited_s: float) -> tuple[Attempt, float]:
            decision, now_s = self._decide_now(request, read, given, tried, allowed)
            room.refuse_hopeless(request, decision, waited_s)
            attempt = self._begin(request, read, decision, now_s, given, tried, waited_s)
            return attempt, decision.planned.chosen.terms.prefill_s

        return await room.wait(request, self._reader.namespace(request.model).model, decision, start)

    def dispatch_now(
        self, request: InferenceRequest, tried: frozenset[str], allowed: frozenset[str] | None = None
    ) -> Attempt | None:
        given = self._reader.gives_params(request)
        read = self._reader.read_now(request)
        if read is None:
            return None
        return self._try_now(request, read, given, tried, allowed)[0]

    def _try_now(
        self,
        request: InferenceRequest,
        read: Reading,
        given: bool,
        tried: frozenset[str],
        allowed: frozenset[str] | None,
    ) -> tuple[RoutedAttempt | None, Decision]:
        """An attempt, unless the request has to wait its turn; and the decision."""
        decision, now_s = self._decide_now(request, read, given, tried, allowed)
        # Whoever has tried before was let in then.
        if self._room is None or tried or self._room.admits(request, decision, now_s):
            return self._begin(request, read, decision, now_s, given, tried), decision
        return None, decision

    def _decide_now(
        self,
        request: InferenceRequest,
        read: Reading,
        given: bool,
        tried: frozenset[str],
        allowed: frozenset[str] | None,
    ) -> tuple[Decision, float]:
        """A decision and the moment that it is about."""
        candidates = self._participants.candidates(request, tried, allowed)
        if self._room is not None:
            candidates = self._room.below_cap(candidates)
        prefillers = self._prefillers(request, given, tried)
        now_s = self._clocks.monotonic_s()
        explore = request.stream and not given
        decision = self._decide(request, read, candidates, now_s, tried, prefillers, explore=explore)
        self._metrics.decision_s.observe(self._clocks.monotonic_s() - now_s)
        return decision, now_s

    def _begin(
        self,
        request: InferenceRequest,
        read: Reading,
        decision: Decision,
        now_s: float,
        given: bool,
        tried: frozenset[str],
        waited_s: float = 0.0,
    ) -> RoutedAttempt:
        """Promise, record, route. No await since the decision, so the load that it saw is still the load."""
        plan = decision.planned.chosen
        # A fresh id for each attempt: an engine that sees one twice breaks the session.
        kv_request_id = new_transfer_id()
        terms = self._terms(request, plan, decision)
        offload_tokens = self._offload_tokens(request, plan)
        params = None if given else transfer_params(plan, kv_request_id, offload_tokens, terms)
        status = self._fleet.get(plan.worker)
        if status is None:
            raise NoWorkerAvailable("no_workers")
        ticket = self._books.promise(request, read, plan, decision, now_s)
        record = self._books.record(request, read, decision, params, attempt=len(tried) + 1)
        record.waited_s, record.plan_id = waited_s, kv_request_id
        leg = None
        if plan.handover is not None:
            leg_terms = self._terms(request, plan.handover.prefill, decision)
            leg = self._legs.open(
                request,
                plan.handover,
                kv_request_id,
                record.prompt_tokens,
                now_s,
                leg_terms,
                decision.resident(plan.handover.prefill),
            )
            record.prefill = leg.record
        tracked = self._recorder.decided(record, decision, followed=not given and _reads_cache(request))
        self._books.count(record)
        self._books.sent(plan, read)
        route = make_route(request, plan, status, record, params, leg.route if leg is not None else None)
        attempt = RoutedAttempt(self._outcomes, request, route, tracked, ticket, now_s, leg)
        if self._room is not None:
            self._room.began(request.tenant)
        if self.behind_proxy:
            attempt.elsewhere = self._elsewhere(attempt, read, decision)
        if leg is not None:
            return attempt  # what a decode worker waits for says little of itself
        if self._calibration is not None and not given and read.prompts and len(read.prompts.token_ids) == 1:
            attempt.followed = plan
        return attempt

    def _elsewhere(self, attempt: RoutedAttempt, read: Reading, decision: Decision) -> Elsewhere:
        theirs = (attempt.request.document or {}).get("kv_transfer_params")
        return Elsewhere(
            decision,
            attempt.record.transfer_params or theirs,
            self._reader.namespace(attempt.request.model).model,
            self._fleet.get,
            lambda other: self._move(attempt, read, other),
        )

    def _move(self, first: RoutedAttempt, read: Reading, decision: Decision) -> RoutedAttempt:
        """Another worker has taken what was sent for ``first``: its load and its record are from now on there.

        What it does with a plan that was made for another teaches nothing.
        """
        request, plan, now_s = first.request, decision.planned.chosen, self._clocks.monotonic_s()
        status = self._fleet.get(plan.worker)
        if status is None:
            raise NoWorkerAvailable("no_workers")
        ticket = self._books.promise(request, read, plan, decision, now_s)
        self._books.sent(plan, read)
        params = first.record.transfer_params
        record = self._books.record(request, read, decision, params, attempt=first.record.attempt + 1)
        record.waited_s, record.prefill = first.record.waited_s, first.record.prefill
        leg, first.leg = first.leg, None
        tracked = self._recorder.decided(record, decision, followed=False)
        self._books.count(record)
        route = make_route(request, plan, status, record, None, leg.route if leg is not None else None)
        if self._room is not None:
            self._room.began(request.tenant)
        return RoutedAttempt(self._outcomes, request, route, tracked, ticket, first.started_s, leg)

    def _offload_tokens(self, request: InferenceRequest, plan: Plan) -> int | None:
        """Leading tokens of the prompt that are worth offloading; None: all.

        A worker that hands its blocks over, or pulls them, needs them in RAM.
        """
        if not self._limit_offload or plan.handover is not None or plan.source is not None:
            return None
        return self._tails.shared_tokens(kind_of(request), self._clocks.random) if self._tails else None

    def _terms(self, request: InferenceRequest, plan: Plan, decision: Decision) -> ExtensionTerms | None:
        """What a worker with our extension is told besides its plan; None for stock vLLM."""
        if self._appraiser is None:
            return None
        # Whoever shares prefixes is one tenant to the engines, as it is to their block hashes.
        tenant = request.tenant.name if request.tenant.salt_key is not None else ""
        return self._appraiser.terms(plan, decision.question, kind_of(request), tenant, self._clocks.random)

    async def explain(self, request: InferenceRequest) -> DecisionRecord:
        """The decision that ``dispatch`` would make now; nothing is sent, promised or kept."""
        given = self._reader.gives_params(request)
        read = await self._reader.read(request)
        candidates = self._participants.candidates(request, frozenset(), dry_run=True)
        prefillers = self._prefillers(request, given, frozenset(), dry_run=True)
        decision = self._decide(
            request, read, candidates, self._clocks.monotonic_s(), frozenset(), prefillers
        )
        plan = decision.planned.chosen
        terms = self._terms(request, plan, decision)
        params = None if given else transfer_params(plan, "pm-dry-run", terms=terms)
        record = self._books.record(request, read, decision, params, attempt=1)
        if plan.handover is not None:
            leg_terms = self._terms(request, plan.handover.prefill, decision)
            leg_params = prefill_params(plan.handover, "pm-dry-run", "pm-dry-run-pull", leg_terms)
            record.prefill = prefill_record(plan.handover, leg_params)
        self._recorder.complete(record, decision)
        return record

    def _prefillers(
        self, request: InferenceRequest, given: bool, tried: frozenset[str], *, dry_run: bool = False
    ) -> Sequence[WorkerStatus]:
        if given:
            return ()
        return self._participants.prefillers(request, tried, dry_run=dry_run)

    def _decide(
        self,
        request: InferenceRequest,
        read: Reading,
        candidates: Sequence[WorkerStatus],
        now_s: float,
        tried: frozenset[str],
        prefillers: Sequence[WorkerStatus],
        *,
        explore: bool = False,
    ) -> Decision:
        return self._decider.decide(
            read.prompts,
            candidates,
            self._participants.peers(tried),
            now_s,
            self._clocks.random,
            prefillers=prefillers,
            pinned_rank=request.dp_rank,
            estimated_tokens=len(request.body) // _BYTES_PER_TOKEN,
            explore=explore,
        )


def _reads_cache(request: InferenceRequest) -> bool:
    """Whether the engine uses what it has cached: not where the log-probabilities of the prompt are wanted.

    vLLM ``get_skip_reading_prefix_cache`` of ``v1/request.py``; ``echo`` with ``logprobs`` asks for them too.
    """
    fields = request.document or {}
    echoed = bool(fields.get("echo")) and fields.get("logprobs") is not None
    return fields.get("prompt_logprobs") is None and not echoed
