# SPDX-License-Identifier: Apache-2.0
"""What the admin API shows, as plain values read from the live objects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from indexer.hashing import HashKey
from indexer.holders import HolderTable, WorkerHolders
from indexer.identity import WorkerId, WorkerRank
from indexer.snapshot.recovery import IndexRecovery
from indexer.subscriber import EventSubscriber
from router.admin.served import Served
from router.costs.calibration import Calibration
from router.costs.kv_report import KvBytesReport
from router.costs.profile import CostProfile
from router.costs.state_file import StateFile
from router.decisions.record import DecisionRecord
from router.decisions.trust import Trust
from router.fleet.fleet import Fleet
from router.fleet.phases import CAN_ANSWER, CAN_PREFILL, models_without
from router.fleet.worker import Health, WorkerStatus
from router.gateway.service_terms import ServiceTerms
from router.map_sources import MapRow, MapSources, Why
from router.metrics import stream_counts
from router.plan.load import Board
from router.request import InferenceRequest


@dataclass(frozen=True, slots=True)
class AdminViews:
    """The objects behind the admin API."""

    fleet: Fleet
    board: Board
    holders: HolderTable
    subscriber: EventSubscriber
    recovery: IndexRecovery
    trust: Trust
    served: Served
    """Who knows of the requests."""
    profile_name: str
    profile: CostProfile
    calibration: Calibration | None
    learnt: StateFile | None
    """Where calibration is kept."""
    kv_bytes: KvBytesReport
    hash_key: HashKey
    backend: str
    explain: Callable[[InferenceRequest], Awaitable[DecisionRecord]]
    silent: Callable[[], set[str]]
    maps: MapSources
    monotonic_s: Callable[[], float]
    terms: ServiceTerms
    discovery_troubles: Callable[[], Sequence[str]] = tuple
    """Why the workers may not be those that should be."""

    async def ready(self) -> dict[str, Any]:
        """Ready when a worker can be given requests; ``degraded`` names what is not as it should be."""
        statuses = self.fleet.statuses()
        healthy = [status.spec.id for status in statuses if status.health is Health.HEALTHY]
        degraded = {
            "unhealthy_workers": [
                s.spec.id for s in statuses if s.health not in (Health.HEALTHY, Health.DRAINING)
            ],
            "event_silent_workers": sorted(self.silent()),
            "approximate_workers": sorted(
                worker for worker, why in self.maps.approximate().items() if why is not Why.NO_EVENTS
            ),
            "partial_workers": [
                worker
                for worker, holders in self.holders.workers().items()
                if any(rank.partial or rank.suspect for rank in holders.ranks)
            ],
            "decision_log": await self.served.troubles(),
            "discovery": list(self.discovery_troubles()),
            "models_without_prefill_worker": models_without(statuses, CAN_PREFILL),
            "models_without_decode_worker": models_without(statuses, CAN_ANSWER),
        }
        return {
            "ready": any(s.health is Health.HEALTHY and s.spec.role in CAN_ANSWER for s in statuses),
            "healthy_workers": healthy,
            "degraded": {name: names for name, names in degraded.items() if names},
        }

    def workers(self) -> list[dict[str, Any]]:
        """Every worker: as configured, as polled, its load, its event streams."""
        silent = self.silent()
        return [self._worker(status, silent) for status in self.fleet.statuses()]

    def index(self) -> dict[str, Any]:
        """Totals of the index and what each worker holds."""
        index = self.holders.index
        return {
            "backend": self.backend,
            "hash_key_id": self.hash_key.id,
            "version": index.version,
            "distinct_blocks": index.distinct_blocks,
            "memory_bytes": index.memory_bytes,
            "recovery": self.recovery.view(),
            "workers": {worker: self._held(holders) for worker, holders in self.holders.workers().items()},
        }

    async def costs(self) -> dict[str, Any]:
        """The profile's constants, and what was learnt over them: prior, fit, n and 95 % interval of each."""
        return {
            "profile": self.profile_name,
            "constants": msgspec.to_builtins(self.profile),
            "calibration": self.calibration.snapshot() if self.calibration is not None else None,
            "kept": self.learnt.view() if self.learnt is not None else None,
            "trials": await self.served.trials(),
            "kv_bytes_per_token": self.kv_bytes.view(),
        }

    def set_drain(self, worker: str, wanted: bool) -> bool:
        return self.fleet.set_drain(worker, wanted)

    def _worker(self, status: WorkerStatus, silent: set[str]) -> dict[str, Any]:
        worker, now_s = status.spec.id, self.monotonic_s()
        holders = self.holders.workers().get(WorkerId(worker))
        ranks = range(status.spec.ranks)
        return {
            "id": worker,
            "url": status.spec.url,
            "health": status.health.value,
            "last_error": status.last_error,
            "consecutive_failures": status.consecutive_failures,
            "parity": status.parity.value,
            "models": sorted(status.models),
            "block_size_tokens": status.block_size_tokens,
            "running": status.running,
            "waiting": status.waiting,
            "kv_cache_usage": status.kv_cache_usage,
            "asleep": status.asleep,
            "sample_age_s": None if status.sampled_at_s is None else now_s - status.sampled_at_s,
            "p2p": status.spec.p2p,
            "extension": status.spec.extension,
            "role": status.spec.role.value,
            "transfer": status.spec.transfer.value if status.spec.transfer else None,
            "in_flight": self.board.in_flight(worker),
            "queue_s": [self.board.queue_s(worker, rank, now_s) for rank in ranks],
            "trust": self.trust.of(worker, now_s),
            "pulls_served": self.board.pulls(worker),
            "event_silent": worker in silent,
            "incarnation": holders.incarnation if holders else None,
            "incarnation_reason": holders.incarnation_reason if holders else None,
            "streams": self._streams(holders) if holders else [],
        }

    def _streams(self, holders: WorkerHolders) -> list[dict[str, Any]]:
        streams, now_s = self.subscriber.streams(), self.monotonic_s()
        sources = {row[:2]: row for row in self.maps.rows()}
        rows = []
        for dp_rank, state in enumerate(holders.ranks):
            stream = streams.get(WorkerRank(holders.worker, dp_rank))
            rows.append(
                {
                    "dp_rank": dp_rank,
                    "connected": state.connected,
                    "seq": state.seq,
                    "age_s": None if state.applied_at_s is None else now_s - state.applied_at_s,
                    "partial": state.partial,
                    "suspect": state.suspect,
                    "state": stream.state.value if stream else None,
                    "counters": stream_counts(stream) if stream else {},
                    "map": _map_view(sources.get((holders.worker, dp_rank))),
                    "events": dict(state.totals),
                }
            )
        return rows

    def _held(self, holders: WorkerHolders) -> dict[str, Any]:
        counts = [self.holders.index.counts(state.slot) for state in holders.ranks]
        return {
            "model": holders.model,
            "incarnation": holders.incarnation,
            "hbm_blocks": sum(one.hbm for one in counts),
            "ram_blocks": sum(one.ram for one in counts),
            "storage_blocks": self.holders.index.counts(holders.store_slot).storage,
            "doubtful_ram_blocks": sum(one.doubtful_ram for one in counts),
            "unidentified_blocks": sum(one.unidentified for one in counts),
            "detached_blocks": sum(one.detached for one in counts),
            "partial": {
                str(rank): state.partial for rank, state in enumerate(holders.ranks) if state.partial
            },
        }


def _map_view(row: MapRow | None) -> dict[str, Any] | None:
    """Where a rank's map comes from; None before the worker's first poll."""
    if row is None:
        return None
    _, _, source, why, since_s, guessed_blocks = row
    return {"source": source, "why": why or None, "for_s": since_s, "approximate_blocks": guessed_blocks}
