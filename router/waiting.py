# SPDX-License-Identifier: Apache-2.0
"""Where requests wait while every worker is busy: the queue of ``plan/admission.py`` on the event loop.

A request that comes while some worker has room and nobody waits passes by one comparison. Others get a ticket. When
load ends anywhere, and every ``_TICK_S`` while somebody waits, the next in order are decided anew and promised on the
load board, one after the other, so that the room is gone for the next as soon as one has it.

A ticket ends exactly once: it becomes an attempt, or an error, or its client has gone. A client that goes in the very
moment when its attempt begins ends that attempt.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from router.config_tenants import AdmissionConfig
from router.errors import Overloaded, ShedReason
from router.fleet.fleet import Fleet
from router.fleet.snapshot import excluding
from router.fleet.worker import WorkerStatus
from router.gateway.routing import Attempt
from router.in_flight import InFlight, InFlightHere
from router.metrics import RouterMetrics
from router.plan.admission import FairQueue, Ticket
from router.plan.decider import Decision
from router.plan.load import Board
from router.plan.tenants import Tenant
from router.request import InferenceRequest, Outcome

_TICK_S = 0.05
_MAX_RETRY_AFTER_S = 60

Start = Callable[[float], tuple[Attempt, float]]
"""Decides and promises, given the seconds waited: the attempt, and the prefill seconds that it was promised."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits, and how it is told."""

    request: InferenceRequest
    start: Start
    told: asyncio.Future[Attempt]
    over_s: float
    """By how much the least busy rank was over the limit."""
    ranks: int


class WaitingRoom:
    """Keeps requests until a worker has room for them. One event loop owns it."""

    def __init__(
        self,
        settings: AdmissionConfig,
        fleet: Fleet,
        board: Board,
        metrics: RouterMetrics,
        monotonic_s: Callable[[], float],
        in_flight: InFlight | None = None,
    ) -> None:
        """``in_flight``: counts of tenants, where this process is not the only one that serves."""
        self._settings = settings
        self._fleet = fleet
        self._board = board
        self._metrics = metrics
        self._monotonic_s = monotonic_s
        self._queue: FairQueue[_Waiting] = FairQueue(settings.max_waiting)
        self._in_flight = in_flight or InFlightHere()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._woken = False

    def below_cap(self, candidates: Sequence[WorkerStatus]) -> Sequence[WorkerStatus]:
        """Those with fewer of our requests than ``max_in_flight_per_worker``; all of them if that leaves none."""
        cap = self._settings.max_in_flight_per_worker
        if cap is None:
            return candidates
        full = [one.spec.id for one in candidates if self._board.in_flight(one.spec.id) >= cap]
        return excluding(candidates, full) or candidates

    def admits(self, request: InferenceRequest, decision: Decision, now_s: float) -> bool:
        """Whether the request may go at once.

        Raises:
            Overloaded: what it asks for cannot be met, and such requests are not kept.
        """
        self.refuse_hopeless(request, decision, 0.0)
        if self._queue or self._is_full(request.tenant):
            return False
        chosen = decision.planned.chosen
        cap = self._settings.max_in_flight_per_worker
        if chosen.terms.queue_s <= self._settings.max_queue_s and cap is None:
            return True
        return self._has_room(request, now_s)

    def refuse_hopeless(self, request: InferenceRequest, decision: Decision, waited_s: float) -> None:
        """Shed a request whose time to first token cannot be met by any candidate, where that is wanted.

        Raises:
            Overloaded: it is one.
        """
        if not self._settings.shed_on_slo or request.slo_ttft_s is None:
            return
        ranking = decision.planned.ranking
        if waited_s + min(plan.terms.total_s for plan in ranking) > request.slo_ttft_s:
            over_s = min(plan.terms.queue_s for plan in ranking)
            raise self._refusal(request.tenant.name, ShedReason.SLO, over_s, len(ranking))

    async def wait(self, request: InferenceRequest, pool: str, decision: Decision, start: Start) -> Attempt:
        """Wait for the turn of a request that was not admitted at once.

        Raises:
            Overloaded: it could not be kept, or not any longer.
            RouterError: ``start`` raised it.
        """
        self._loop = asyncio.get_running_loop()
        now_s, ranking = self._monotonic_s(), decision.planned.ranking
        least_s = min(plan.terms.queue_s for plan in ranking)
        over_s = max(least_s - self._settings.max_queue_s, 0.0)
        if request.sheddable:
            raise self._refusal(request.tenant.name, ShedReason.SHEDDABLE, over_s, len(ranking))
        entry = _Waiting(request, start, self._loop.create_future(), over_s, len(ranking))
        tenant = request.tenant
        ticket = Ticket(
            tenant=tenant.name,
            weight=tenant.weight,
            priority=request.priority,
            pool=pool,
            cost_s=decision.planned.chosen.terms.prefill_s,
            since_s=now_s,
            deadline_s=now_s + min(self._settings.max_wait_s, self._slo_s(request)),
            payload=entry,
            lane=f"{request.dp_rank} {request.model}",
        )
        victim = self._queue.enter(ticket)
        if victim is not None:
            self._shed(victim, ShedReason.FULL)
        self._show(tenant.name)
        self._let_through()
        self._arm()
        try:
            return await entry.told
        except asyncio.CancelledError:
            if entry.told.done() and not entry.told.cancelled() and entry.told.exception() is None:
                entry.told.result().finish(Outcome.CLIENT_GONE, None)
            raise
        finally:
            self._queue.leave(ticket)
            self._show(tenant.name)

    def began(self, tenant: Tenant) -> None:
        """An attempt of the tenant is under way."""
        self._in_flight.add(tenant.name, 1)

    def ended(self, tenant: Tenant, worker: str) -> None:
        """That attempt is over, its load released."""
        self._in_flight.add(tenant.name, -1)
        if self._queue and (tenant.max_in_flight is not None or self._is_worker_free(worker)):
            self._wake()

    def freed(self, worker: str) -> None:
        """A prefill is done."""
        if self._queue and self._is_worker_free(worker):
            self._wake()

    def view(self) -> dict[str, Any]:
        """Who waits, for the admin API."""
        now_s = self._monotonic_s()
        rows = []
        for name in sorted({*self._queue.tenants(), *self._in_flight.tenants()}):
            tickets = self._queue.waiting(name)
            rows.append(
                {
                    "tenant": name,
                    "waiting": len(tickets),
                    "waiting_prefill_s": sum(ticket.cost_s for ticket in tickets),
                    "oldest_wait_s": now_s - tickets[0].since_s if tickets else None,
                    "in_flight": self._in_flight.here(name),
                }
            )
        return {"waiting": len(self._queue), "max_waiting": self._settings.max_waiting, "tenants": rows}

    def _slo_s(self, request: InferenceRequest) -> float:
        wanted_s = request.slo_ttft_s if self._settings.shed_on_slo else None
        return math.inf if wanted_s is None else wanted_s

    def _is_full(self, tenant: Tenant) -> bool:
        most = tenant.max_in_flight
        return most is not None and self._in_flight.everywhere(tenant.name) >= most

    def _has_room(self, request: InferenceRequest, now_s: float) -> bool:
        """Whether any candidate is below the limits. Without candidates too: the error tells more than waiting."""
        candidates = self._fleet.candidates(request.model, now_s, dry_run=True)
        return not candidates or any(self._is_free(one, request.dp_rank, now_s) for one in candidates)

    def _is_free(self, status: WorkerStatus, pinned_rank: int | None, now_s: float) -> bool:
        worker, cap = status.spec.id, self._settings.max_in_flight_per_worker
        if cap is not None and self._board.in_flight(worker) >= cap:
            return False
        ranks = range(status.spec.ranks)
        if pinned_rank is not None and pinned_rank in ranks:
            ranks = range(pinned_rank, pinned_rank + 1)
        limit_s = self._settings.max_queue_s
        return any(self._board.queue_s(worker, rank, now_s) <= limit_s for rank in ranks)

    def _is_worker_free(self, worker: str) -> bool:
        status = self._fleet.get(worker)
        return status is not None and self._is_free(status, None, self._monotonic_s())

    def _wake(self) -> None:
        """Let through soon: whoever reports the end of an attempt has a client to serve first."""
        if not self._woken and self._loop is not None:
            self._woken = True
            self._loop.call_soon(self._awake)

    def _awake(self) -> None:
        self._woken = False
        self._let_through()

    def _arm(self) -> None:
        if self._queue and self._tick is None and self._loop is not None:
            self._tick = self._loop.call_later(_TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        """Queues shrink as time passes, workers come and go, and nobody may wait for ever."""
        self._tick = None
        for ticket in self._queue.expire(self._monotonic_s()):
            by_slo = self._slo_s(ticket.payload.request) < self._settings.max_wait_s
            self._shed(ticket, ShedReason.SLO if by_slo else ShedReason.TIMEOUT)
        self._let_through()
        self._arm()

    def _let_through(self) -> None:
        """Start tickets in order until nothing has room for those that are left."""
        while self._queue:
            now_s = self._monotonic_s()
            seen: dict[tuple[str | None, int | None], bool] = {}
            ticket = self._queue.take(lambda one: self._is_open(one, now_s, seen))  # noqa: B023 - called at once
            if ticket is None:
                return
            self._start(ticket, now_s)

    def _is_open(
        self, ticket: Ticket[_Waiting], now_s: float, seen: dict[tuple[str | None, int | None], bool]
    ) -> bool:
        request = ticket.payload.request
        if ticket.payload.told.done():  # its client has gone: out of the way
            return True
        if self._is_full(request.tenant):
            return False
        key = (request.model, request.dp_rank)
        if key not in seen:
            seen[key] = self._has_room(request, now_s)
        return seen[key]

    def _start(self, ticket: Ticket[_Waiting], now_s: float) -> None:
        entry, waited_s = ticket.payload, now_s - ticket.since_s
        if entry.told.done():
            self._queue.correct(ticket, 0.0)
            return
        try:
            attempt, cost_s = entry.start(waited_s)
        except Exception as error:
            self._queue.correct(ticket, 0.0)
            entry.told.set_exception(error)
            return
        self._queue.correct(ticket, cost_s)
        self._metrics.wait_s.observe(waited_s)
        entry.told.set_result(attempt)

    def _shed(self, ticket: Ticket[_Waiting], reason: ShedReason) -> None:
        entry = ticket.payload
        if not entry.told.done():
            entry.told.set_exception(self._refusal(ticket.tenant, reason, entry.over_s, entry.ranks))

    def _refusal(self, tenant: str, reason: ShedReason, over_s: float, ranks: int) -> Overloaded:
        """Try again when what waits now is prefilled, if the fleet has nothing else to do."""
        self._metrics.shed.labels(tenant, reason.value).inc()
        backlog_s = over_s + self._queue.cost_s / ranks
        return Overloaded(reason, min(max(math.ceil(backlog_s), 1), _MAX_RETRY_AFTER_S))

    def _show(self, tenant: str) -> None:
        self._metrics.waiting.labels(tenant).set(len(self._queue.waiting(tenant)))
