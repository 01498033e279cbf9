# SPDX-License-Identifier: Apache-2.0
"""The fleet in a process that serves: as the keeper tells it, and what happened here since.

Health, load and failures are the keeper's, who hears of every process's. A failure of this process counts here at once:
the breaker is the keeper's, with those outcomes of ours on top that it did not know yet. So it is what the keeper's
will be, as far as this process can tell.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import fields

from router.config_fleet import FleetConfig
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet, FleetCallbacks
from router.fleet.member import Member
from router.fleet.poller import Reach
from router.fleet.worker import WorkerStatus
from router.processes.seen import OutcomeSeen
from router.processes.told import WorkerTold
from router.request import Outcome

_MOST_PENDING = 100_000
_COPIED = [one.name for one in fields(WorkerStatus) if one.name not in {"spec", "models", "parity"}]


class FollowedFleet(Fleet):
    """Asks no worker itself; ``start`` and ``stop`` do nothing."""

    def __init__(
        self,
        settings: FleetConfig,
        tell: Callable[[OutcomeSeen], int],
        clock: Callable[[], float] = time.monotonic,
        callbacks: FleetCallbacks | None = None,
    ) -> None:
        """``tell`` the keeper; it returns the number of the batch that will hold what it was given."""
        super().__init__((), settings, clock, callbacks)
        self._tell = tell
        self._pending: deque[tuple[int, OutcomeSeen]] = deque(maxlen=_MOST_PENDING)
        """Outcomes that the keeper's state does not include yet, with their batch."""

    async def start(self) -> None:
        """Nothing to open."""

    async def stop(self) -> None:
        """Nothing to close."""

    def record_outcome(self, worker_id: str, outcome: Outcome, now_s: float) -> None:
        super().record_outcome(worker_id, outcome, now_s)
        if worker_id in self._members:
            seen = OutcomeSeen(worker_id, outcome, now_s)
            self._pending.append((self._tell(seen), seen))

    def taken(self, batch: int) -> None:
        """The states that follow include our batches up to that one."""
        while self._pending and self._pending[0][0] <= batch:
            self._pending.popleft()

    def forget_pending(self) -> None:
        """Another keeper will tell: what the one before had not taken is not told again."""
        self._pending.clear()

    def put(self, told: WorkerTold) -> None:
        """A worker is in the fleet, in this state."""
        worker_id = told.status.spec.id
        member = self._members.get(worker_id)
        if member is None:
            member = self._take_in(told)
        elif member.status.spec != told.status.spec:
            member.status.spec = told.status.spec
        _copy(told, member)
        now_s = self._clock()
        joined = told.answers and not member.answers
        member.answers = told.answers
        self._recall(member.breaker, told)
        self._refresh(member, now_s)
        if joined:
            self._callbacks.on_joined(worker_id)

    def _recall(self, breaker: Breaker, told: WorkerTold) -> None:
        offered, retry_at_s = breaker.trial and breaker.pause_s == told.breaker.pause_s, breaker.retry_at_s
        breaker.recall(told.breaker)
        if offered:  # the turn that a request of ours took is not known to the keeper
            breaker.trial, breaker.retry_at_s = True, max(retry_at_s, breaker.retry_at_s)
        for _, seen in self._pending:
            if seen.worker == told.status.spec.id:
                breaker.record(seen.outcome, seen.at_s)

    def _take_in(self, told: WorkerTold) -> Member:
        settings = self._settings
        breaker = Breaker(settings.failure_threshold, settings.backoff_min_s, settings.backoff_max_s)
        member = Member(WorkerStatus(told.status.spec), breaker)
        self._members[told.status.spec.id] = member
        self._forget_lists()
        return member


def _copy(told: WorkerTold, member: Member) -> None:
    """The object stays, as lists and the planner's table refer to it; so does what is equal."""
    status = member.status
    for name in _COPIED:
        setattr(status, name, getattr(told.status, name))
    if status.models != told.status.models:
        status.models = told.status.models
    member.draining, member.ready = told.draining, told.ready
    member.polled = told.asked
    member.reach = (Reach.OK if told.answers else Reach.REFUSED) if told.asked else None
