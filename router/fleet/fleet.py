# SPDX-License-Identifier: Apache-2.0
"""Who can take a request now.

A worker's :class:`~router.fleet.worker.Health` is derived from four facts, strongest first: an
operator drains it, it does not answer ``/health``, its requests fail (:mod:`router.fleet.breaker`),
it answers. Only the event loop that runs the fleet touches it; readers take statuses as they are.

Cost: lists of workers are made once and given out until a worker changes in what planning looks at (its health,
models, block size and the like), so ``candidates`` is O(1) but after such a change, and O(workers in their pause). One
task per worker polls it, at most one request at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import aiohttp

from router.config_fleet import FleetConfig
from router.fleet.breaker import Breaker, BreakerState
from router.fleet.phases import CAN_ANSWER
from router.fleet.poller import PollResult, Reach, WorkerPoller
from router.fleet.snapshot import Snapshot, excluding
from router.fleet.worker import Health, ModelInfo, Role, WorkerSpec, WorkerStatus
from router.request import Outcome

_log = logging.getLogger(__name__)

_SAME_START_S = 1.0
"""Two readings of a process's start time that differ by less are the same process."""


def _ignore(*_: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class FleetCallbacks:
    """Called from the event loop, after the status has been updated; must not block."""

    on_status: Callable[[str], None] = _ignore
    """A poll of this worker ended."""
    on_process_start_time: Callable[[str, float], None] = _ignore
    """The worker told its start time; called when it is first known and when it changes."""
    on_joined: Callable[[str], None] = _ignore
    """The worker answers: for the first time, or again after it did not."""
    on_removed: Callable[[str], None] = _ignore
    """The worker is no longer part of the fleet."""


@dataclass(slots=True)
class _Member:
    status: WorkerStatus
    breaker: Breaker
    draining: bool = False
    reach: Reach | None = None
    silent_polls: int = 0
    answers: bool = False
    polled: bool = False
    planning_facts: object = None
    """What lists of workers were made of."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class _Lists:
    """Workers of some roles that serve a model."""

    ready: Snapshot
    sleeping: Snapshot
    paused: tuple[_Member, ...]
    """After failures."""


class Fleet:
    """The workers, their health and load."""

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        settings: FleetConfig,
        clock: Callable[[], float] = time.monotonic,
        callbacks: FleetCallbacks | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._callbacks = callbacks or FleetCallbacks()
        self._members: dict[str, _Member] = {}
        self._all: Snapshot | None = None
        self._lists: dict[tuple[str | None, tuple[Role, ...]], _Lists] = {}
        self._served: frozenset[str] | None = None
        self._session: aiohttp.ClientSession | None = None
        for spec in specs:
            self.add(spec)

    async def start(self) -> None:
        """Poll every worker once, all at the same time, then go on in the background."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            # Compressed answers are not asked for: a small one could grow past every limit.
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )
        await asyncio.gather(*(self._poll_once(member) for member in self._members.values()))
        for member in self._members.values():
            self._watch(member)

    async def stop(self) -> None:
        """Stop polling; statuses stay as they are."""
        tasks = [member.task for member in self._members.values() if member.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def add(self, spec: WorkerSpec) -> None:
        """Take in a worker; it is asked at once when the fleet runs.

        Raises:
            ValueError: a worker of that name is there already.
        """
        if spec.id in self._members:
            raise ValueError(f"worker {spec.id} is already in the fleet")
        settings = self._settings
        breaker = Breaker(settings.failure_threshold, settings.backoff_min_s, settings.backoff_max_s)
        member = _Member(WorkerStatus(spec, block_size_tokens=spec.block_size_tokens), breaker)
        self._members[spec.id] = member
        self._forget_lists()
        if self._session is not None:
            self._watch(member)

    def remove(self, worker_id: str) -> None:
        """Forget a worker and everything kept for it; an unknown name is ignored."""
        member = self._members.pop(worker_id, None)
        if member is None:
            return
        self._forget_lists()
        if member.task is not None:
            member.task.cancel()
        self._callbacks.on_removed(worker_id)

    def statuses(self) -> Sequence[WorkerStatus]:
        """Every worker, in the order of the configuration."""
        if self._all is None:
            self._all = Snapshot([member.status for member in self._members.values()])
        return self._all

    def get(self, worker_id: str) -> WorkerStatus | None:
        """One worker. O(1)."""
        member = self._members.get(worker_id)
        return None if member is None else member.status

    def model_info(self, model: str | None) -> ModelInfo | None:
        """What any worker says of a served name, an answering worker first; None if none lists it."""
        known = None
        for member in self._members.values():
            info = member.status.models.get(model) if model is not None else None
            if info is not None and member.answers:
                return info
            known = known or info
        return known

    def candidates(
        self,
        model: str | None,
        now_s: float,
        exclude: Collection[str] = frozenset(),
        *,
        dry_run: bool = False,
    ) -> Sequence[WorkerStatus]:
        """Workers that may be sent a whole request for ``model``.

        Healthy, awake, not draining, of a role that decodes, and serving the model; a model that no worker
        lists is left to any of them, so that the client gets the worker's own 404. A worker that paused after
        failures is offered to one caller at a time; a ``dry_run`` does not use up that turn. When nobody else is
        left, those that sleep and then those in their pause are returned: a doubtful worker is better than none.
        """
        ready, sleeping, paused = self._sorted(model, now_s, exclude, CAN_ANSWER, dry_run)
        return ready or sleeping or paused

    def prefillers(
        self,
        model: str | None,
        now_s: float,
        exclude: Collection[str] = frozenset(),
        *,
        dry_run: bool = False,
    ) -> Sequence[WorkerStatus]:
        """Workers of role ``prefill`` that may be sent a prefill; never doubtful ones, since it can be done without."""
        return self._sorted(model, now_s, exclude, (Role.PREFILL,), dry_run)[0]

    def _sorted(
        self,
        model: str | None,
        now_s: float,
        exclude: Collection[str],
        roles: tuple[Role, ...],
        dry_run: bool,
    ) -> tuple[Sequence[WorkerStatus], Sequence[WorkerStatus], Sequence[WorkerStatus]]:
        """Workers of these roles: ready, asleep, paused after failures."""
        lists = self._lists_of(model, roles)
        paused = [member for member in lists.paused if member.status.spec.id not in exclude]
        admitted = [
            member.status
            for member in paused
            if member.breaker.state(now_s) is BreakerState.HALF_OPEN
            and not member.status.asleep
            and (dry_run or member.breaker.admit(now_s))
        ]
        ready = excluding(lists.ready, exclude)
        return (
            [*ready, *admitted] if admitted else ready,
            excluding(lists.sleeping, exclude),
            [member.status for member in paused],
        )

    def _lists_of(self, model: str | None, roles: tuple[Role, ...]) -> _Lists:
        """Clients name any model, so all that nobody lists share an entry."""
        listed = model if self._serving(model) else None
        lists = self._lists.get((listed, roles))
        if lists is None:
            lists = self._lists[listed, roles] = self._make_lists(listed, roles)
        return lists

    def _make_lists(self, model: str | None, roles: tuple[Role, ...]) -> _Lists:
        ready: list[WorkerStatus] = []
        sleeping: list[WorkerStatus] = []
        paused: list[_Member] = []
        for member in self._members.values():
            status = member.status
            if not member.answers or member.draining or status.spec.role not in roles:
                continue
            if model is not None and model not in status.models:
                continue
            if member.breaker.pause_s:
                paused.append(member)
            elif status.asleep:
                sleeping.append(status)
            else:
                ready.append(status)
        return _Lists(Snapshot(ready), Snapshot(sleeping), tuple(paused))

    def _serving(self, model: str | None) -> bool:
        """Whether any worker, in whatever state, lists the model."""
        if self._served is None:
            self._served = frozenset(name for m in self._members.values() for name in m.status.models)
        return model in self._served

    def _forget_lists(self) -> None:
        self._all = self._served = None
        self._lists.clear()

    def unavailable_reason(self, model: str | None, exclude: Collection[str] = frozenset()) -> str:
        """One word for an empty ``candidates``: why nothing can take the request."""
        members = [m for worker_id, m in self._members.items() if worker_id not in exclude]
        if not self._members:
            return "no_workers"
        if not members:
            return "all_tried"
        able = [m for m in members if m.status.spec.role in CAN_ANSWER]
        if not able:
            return "all_tried" if exclude else "no_decode_worker"
        answering = [m for m in able if m.answers]
        if not answering:
            return "no_decode_worker" if any(m.answers for m in members) else "all_unhealthy"
        if all(m.draining for m in answering):
            return "all_draining"
        return "model_unavailable" if model is not None else "all_unhealthy"

    def set_drain(self, worker_id: str, drain: bool) -> bool:
        """Take a worker out of service or back; False when there is no such worker."""
        member = self._members.get(worker_id)
        if member is None:
            return False
        member.draining = drain
        self._refresh(member, self._clock())
        return True

    def record_outcome(self, worker_id: str, outcome: Outcome, now_s: float) -> None:
        """Learn how an attempt at a worker ended; a worker that has left is ignored."""
        member = self._members.get(worker_id)
        if member is None:
            return
        member.breaker.record(outcome, now_s)
        self._refresh(member, now_s)

    def _watch(self, member: _Member) -> None:
        name = f"poll {member.status.spec.id}"
        member.task = asyncio.create_task(self._poll_forever(member), name=name)

    async def _poll_forever(self, member: _Member) -> None:
        while True:
            if member.polled:
                await asyncio.sleep(self._settings.poll_interval_s)
            await self._poll_once(member)

    async def _poll_once(self, member: _Member) -> None:
        if self._session is None:
            return
        poller = WorkerPoller(member.status.spec, self._session, self._settings.poll_timeout_s)
        result = await poller.poll(first=not member.answers)
        if self._members.get(member.status.spec.id) is member:
            member.polled = True
            try:
                self._apply(member, result, self._clock())
            except Exception:
                _log.exception("a callback failed after a poll of %s", member.status.spec.id)

    def _apply(self, member: _Member, result: PollResult, now_s: float) -> None:
        """Update the status by one poll, then tell."""
        joined = self._apply_reach(member, result)
        member.status.last_error = result.error
        if result.models is not None:
            member.status.models = dict(result.models)
        if result.event_ranks and not member.status.spec.ranks_given:
            member.status.spec = replace(member.status.spec, ranks=result.event_ranks)
        new_process = self._apply_metrics(member, result, now_s)
        self._refresh(member, now_s)
        worker_id = member.status.spec.id
        start_time_s = member.status.process_start_time_s
        if new_process and start_time_s is not None:
            self._callbacks.on_process_start_time(worker_id, start_time_s)
        if joined:
            self._callbacks.on_joined(worker_id)
        self._callbacks.on_status(worker_id)

    def _apply_reach(self, member: _Member, result: PollResult) -> bool:
        """Whether the worker answers from now on and did not before."""
        before = member.answers
        member.silent_polls = member.silent_polls + 1 if result.reach is Reach.SILENT else 0
        if result.reach is Reach.SILENT:
            # A loaded worker misses a poll now and then; a refused connection leaves no doubt.
            member.answers = before and member.silent_polls < self._settings.failure_threshold
        else:
            member.answers = result.reach is Reach.OK
        member.reach = result.reach
        if before and not member.answers:
            _log.warning("worker %s left: %s", member.status.spec.id, result.error)
        return member.answers and not before and result.reach is Reach.OK

    def _apply_metrics(self, member: _Member, result: PollResult, now_s: float) -> bool:
        """Take over the gauges; whether the process was not known before."""
        metrics, status = result.metrics, member.status
        if metrics is None:
            return False
        if metrics.running is not None or metrics.waiting is not None:
            status.running = metrics.running or 0
            status.waiting = metrics.waiting or 0
            status.sampled_at_s = now_s
        if metrics.kv_cache_usage is not None:
            status.kv_cache_usage = metrics.kv_cache_usage
        if metrics.block_size_tokens is not None:
            status.block_size_tokens = metrics.block_size_tokens
        if metrics.cache_dtype is not None:
            status.cache_dtype = metrics.cache_dtype
        if metrics.kv_bytes_per_token is not None:
            status.kv_bytes_per_token = metrics.kv_bytes_per_token
        if metrics.asleep is not None:
            status.asleep = metrics.asleep
        old, new = status.process_start_time_s, metrics.process_start_time_s
        if new is None or (old is not None and abs(old - new) < _SAME_START_S):
            return False
        if old is not None:
            member.breaker.reset()  # the failures were those of a process that is gone
        status.process_start_time_s = new
        return True

    def _refresh(self, member: _Member, now_s: float) -> None:
        status, breaker = member.status, member.breaker
        status.consecutive_failures = breaker.consecutive_failures
        status.retry_at_s = breaker.retry_at_s
        status.answering = member.answers
        if member.draining:
            status.health = Health.DRAINING
        elif member.reach is None:
            status.health = Health.UNKNOWN
        elif not member.answers:
            status.health = Health.UNHEALTHY
        elif breaker.state(now_s) is not BreakerState.CLOSED:
            status.health = Health.BACKOFF
        else:
            status.health = Health.HEALTHY
        facts = (
            status.spec,
            status.models,
            status.block_size_tokens,
            status.cache_dtype,
            status.asleep,
            status.answering,
            status.health,
            member.draining,
            bool(breaker.pause_s),
        )
        if facts != member.planning_facts:
            member.planning_facts = facts
            self._forget_lists()
