# SPDX-License-Identifier: Apache-2.0
"""Who can take a request now.

A worker's :class:`~router.fleet.worker.Health` is derived from five facts, strongest first: an
operator drains it, it does not answer ``/health``, whoever runs it says that it is not ready, its requests fail
(:mod:`router.fleet.breaker`), it answers. Only the event loop that runs the fleet touches it; readers take statuses as they are.

Cost: lists of workers are made once and given out until a worker changes in what planning looks at (its health,
models, block size and the like), so ``candidates`` is O(1) but after such a change, and O(workers in their pause). One
task per worker polls it, at most one request at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import aiohttp

from router.config_fleet import FleetConfig
from router.fleet.breaker import Breaker, BreakerState
from router.fleet.member import Member
from router.fleet.phases import CAN_ANSWER
from router.fleet.poller import PollResult, WorkerPoller
from router.fleet.snapshot import Snapshot, excluding
from router.fleet.worker import Health, ModelInfo, Role, WorkerSpec, WorkerStatus
from router.request import Outcome

_log = logging.getLogger(__name__)


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
    on_restarted: Callable[[str], None] = _ignore
    """Whoever runs the worker says that it is another process now."""


@dataclass(frozen=True, slots=True)
class _Lists:
    """Workers of some roles that serve a model."""

    ready: Snapshot
    sleeping: Snapshot
    paused: tuple[Member, ...]
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
        self._members: dict[str, Member] = {}
        self._all: Snapshot | None = None
        self._lists: dict[tuple[str | None, tuple[Role, ...]], _Lists] = {}
        self._served: frozenset[str] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._watches: list[set[str]] = []
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
        member = Member(WorkerStatus(spec, block_size_tokens=spec.block_size_tokens), breaker)
        self._members[spec.id] = member
        self._forget_lists()
        self._changed(spec.id)
        if self._session is not None:
            self._watch(member)

    def remove(self, worker_id: str) -> None:
        """Forget a worker and everything kept for it; an unknown name is ignored."""
        member = self._members.pop(worker_id, None)
        if member is None:
            return
        self._forget_lists()
        self._changed(worker_id)
        if member.task is not None:
            member.task.cancel()
        self._callbacks.on_removed(worker_id)

    def replace(self, spec: WorkerSpec) -> None:
        """Take in a worker in place of the one of its name, of which only an operator's drain is kept."""
        known = self._members.get(spec.id)
        self.remove(spec.id)
        self.add(spec)
        if known is not None and known.draining:
            self.set_drain(spec.id, True)

    def restarted(self, worker_id: str) -> None:
        """The worker is another process now: what failed before does not count."""
        member = self._members.get(worker_id)
        if member is None:
            return
        member.breaker.reset()
        self._refresh(member, self._clock())
        self._callbacks.on_restarted(worker_id)

    def set_ready(self, worker_id: str, ready: bool) -> None:
        """Whether whoever runs the worker says that it takes requests; an unknown name is ignored."""
        member = self._members.get(worker_id)
        if member is not None:
            member.ready = ready
            self._refresh(member, self._clock())

    def watch(self) -> set[str]:
        """Workers that have changed, polled, come or gone since; who asked for the set takes out what it has read."""
        watch = set(self._members)
        self._watches.append(watch)
        return watch

    def member(self, worker_id: str) -> Member | None:
        """All that is known of one worker; to be read only. O(1)."""
        return self._members.get(worker_id)

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
        paused: list[Member] = []
        for member in self._members.values():
            status = member.status
            if not member.answers or member.draining or not member.ready or status.spec.role not in roles:
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
        if all(m.draining or not m.ready for m in answering):
            return "none_ready"
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
        before = member.breaker.memory()
        member.breaker.record(outcome, now_s)
        # Of the thousands that end well nobody needs to hear.
        if member.breaker.memory() != before or member.status.health is Health.BACKOFF:
            self._refresh(member, now_s)

    def _watch(self, member: Member) -> None:
        name = f"poll {member.status.spec.id}"
        member.task = asyncio.create_task(self._poll_forever(member), name=name)

    async def _poll_forever(self, member: Member) -> None:
        while True:
            if member.polled:
                await asyncio.sleep(self._settings.poll_interval_s)
            await self._poll_once(member)

    async def _poll_once(self, member: Member) -> None:
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

    def _apply(self, member: Member, result: PollResult, now_s: float) -> None:
        """Update the status by one poll, then tell."""
        change = member.apply(result, now_s, self._settings.failure_threshold)
        self._refresh(member, now_s)
        worker_id = member.status.spec.id
        if change.new_process_start_s is not None:
            self._callbacks.on_process_start_time(worker_id, change.new_process_start_s)
        if change.joined:
            self._callbacks.on_joined(worker_id)
        self._callbacks.on_status(worker_id)

    def _refresh(self, member: Member, now_s: float) -> None:
        if member.refresh(now_s):
            self._forget_lists()
        self._changed(member.status.spec.id)

    def _changed(self, worker_id: str) -> None:
        for watch in self._watches:
            watch.add(worker_id)
