# SPDX-License-Identifier: Apache-2.0
"""Ties the fleet to the index: a worker that joins is registered and subscribed to, one that leaves is forgotten."""

from __future__ import annotations

import logging

from indexer.holders import HolderTable
from indexer.identity import WorkerId, WorkerRank
from indexer.snapshot.sections import Recalled
from indexer.subscriber import EventSubscriber, RankEndpoints
from router.fleet.fleet import Fleet
from router.fleet.worker import WorkerSpec, WorkerStatus

log = logging.getLogger(__name__)


class WorkerIngest:
    """Called by the fleet on its event loop; the subscriber's thread does the rest."""

    def __init__(
        self,
        holders: HolderTable,
        subscriber: EventSubscriber,
        recalled: Recalled | None = None,
        offload_grace_s: float = 0.0,
    ) -> None:
        """``recalled``: what workers held before this process began, if that is known.

        ``offload_grace_s``: how long a block may be on its way from HBM to RAM, where a worker offloads.
        """
        self._holders = holders
        self._subscriber = subscriber
        self._recalled = Recalled() if recalled is None else recalled
        self._offload_grace_s = offload_grace_s
        self._asleep: set[str] = set()
        self._without_room: set[str] = set()
        self._registered: dict[str, tuple[str, int, float]] = {}
        self._told_at_s: dict[str, float] = {}

    def joined(self, fleet: Fleet, worker_id: str) -> None:
        """Start to follow a worker once its model is known; a changed model or rank count starts over."""
        status = fleet.get(worker_id)
        model = _base_model(status) if status is not None else None
        if status is None or model is None:
            return
        grace_s = self._offload_grace_s if status.spec.offloads else 0.0
        identity = (model, status.spec.ranks, grace_s)
        if self._registered.get(worker_id) == identity:
            return
        was_without_room = worker_id in self._without_room
        self.removed(worker_id)
        worker = WorkerId(worker_id)
        try:
            self._holders.register(worker, model, status.spec.ranks, offload_grace_s=grace_s)
        except MemoryError:
            self._without_room.add(worker_id)
            if not was_without_room:
                log.error("worker %s: the index has no room for it; tried again with each poll", worker_id)
            return
        if status.spec.events is not None:
            streams = self._recalled.adopt(self._holders, worker, rank_endpoints(status.spec))
            self._subscriber.add(streams)
        self._registered[worker_id] = identity

    def removed(self, worker_id: str) -> None:
        """Forget a worker."""
        self._without_room.discard(worker_id)
        self._told_at_s.pop(worker_id, None)
        if self._registered.pop(worker_id, None) is not None:
            self._subscriber.remove(WorkerId(worker_id))
            self._holders.unregister(WorkerId(worker_id))

    def restarted(self, worker_id: str) -> None:
        """Another process at the same place: it holds nothing of what the one before held."""
        if worker_id in self._registered:
            self._subscriber.restarted(WorkerId(worker_id), "the container restarted")

    def polled(self, fleet: Fleet, worker_id: str) -> None:
        """A poll ended: join a worker whose model was unknown; empty the map of one that went to sleep.

        Its start time is passed on each time: an unchanged one ends the suspicion of a reconnected stream.
        """
        if worker_id not in self._registered:
            self.joined(fleet, worker_id)
        status = fleet.get(worker_id)
        if status is not None:
            self._tell_start_time(status)
        if status is None or not status.asleep:
            self._asleep.discard(worker_id)
        elif worker_id not in self._asleep:
            # The engine publishes its clear with the next step, which a sleeping engine never makes.
            self._asleep.add(worker_id)
            self._holders.clear_device(WorkerId(worker_id))

    def _tell_start_time(self, status: WorkerStatus) -> None:
        worker_id, start_s, sampled_s = status.spec.id, status.process_start_time_s, status.sampled_at_s
        if start_s is None or sampled_s is None or sampled_s == self._told_at_s.get(worker_id):
            return
        # A poll that broke off may have read the metrics of a process that has since been replaced.
        if worker_id in self._registered and status.last_error is None:
            self._told_at_s[worker_id] = sampled_s
            self._subscriber.process_started(WorkerId(worker_id), start_s)


def rank_endpoints(spec: WorkerSpec) -> list[RankEndpoints]:
    """One endpoint per rank: vLLM adds the rank to both ports."""
    worker = WorkerId(spec.id)
    return [
        RankEndpoints(
            WorkerRank(worker, rank),
            _with_offset(spec.events or "", rank),
            _with_offset(spec.replay, rank) if spec.replay else None,
        )
        for rank in range(spec.ranks)
    ]


def _with_offset(endpoint: str, rank: int) -> str:
    if rank == 0 or not endpoint.startswith("tcp://"):
        return endpoint
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}"


def _base_model(status: WorkerStatus) -> str | None:
    return next((info.base for info in status.models.values()), None)
