# SPDX-License-Identifier: Apache-2.0
"""The service of one process without its servers: who serves, who holds what, and ``router.deciding`` over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from indexer.holders import HolderTable
from indexer.identity import WorkerId
from indexer.index import PrefixIndex, open_index
from indexer.snapshot.recovery import IndexRecovery
from indexer.subscriber import EventSubscriber
from router.admin.served import Served, ServedHere
from router.admin.views import AdminViews
from router.build import claim_snapshot, hash_key, limits, profile, recovery
from router.config import Config
from router.config_fleet import WorkerEntry
from router.costs.calibration import Calibration
from router.costs.kv_report import KvBytesReport
from router.costs.state_file import StateFile
from router.deciding import Deciding, Known
from router.decisions.collector import TrustCollector
from router.decisions.trust import Trust
from router.fleet.discovery.sources import open_discovery
from router.fleet.fleet import Fleet, FleetCallbacks
from router.fleet.phases import check_phases
from router.fleet.static import static_workers
from router.ingest import WorkerIngest
from router.map_metrics import MapMetrics
from router.map_sources import MapSources
from router.metrics import RouterMetrics, StateCollector
from router.plan.load import Board, LoadBoard
from router.plan.native_board import NativeLoadBoard


class Brain:
    """The service without its servers.

    ``start`` and ``stop`` run once each, on the event loop that serves.
    """

    def __init__(
        self,
        config: Config,
        board: Board | None = None,
        index: PrefixIndex | None = None,
        check_workers: Callable[[Sequence[WorkerEntry], str], None] | None = None,
    ) -> None:
        """Build everything; nothing is opened yet. ``board`` and ``index``: where they are not of this process alone.

        ``check_workers`` may refuse entries of ``fleet.file``.

        Raises:
            ConfigError: a value that only its user can judge (profile, tokenizer, key file).
        """
        self.config = config
        if not config.fleet.discovers:
            check_phases(static_workers(config.fleet.workers))
        self._profile = profile(config)
        self.calibration = Calibration(self._profile) if config.costs.calibrate else None
        self._learnt = self._state_file(config)
        self._kv_bytes = KvBytesReport(self._profile.kv_bytes_per_token)
        self._hash_key = hash_key(config)
        if index is None:
            index = open_index(self._hash_key, limits(config), config.index.backend)
        self.holders = HolderTable(index, time.monotonic)
        self.subscriber = EventSubscriber(self.holders, time.monotonic, config.index.replay_timeout_s)
        self.recovery: IndexRecovery = recovery(
            config,
            self.holders,
            self.subscriber,
            self._hash_key,
            lambda worker: worker in self.maps.approximate(),
        )
        self._ingest = WorkerIngest(
            self.holders, self.subscriber, self.recovery.recalled, config.index.offload_grace_s
        )
        if board is None:
            board = NativeLoadBoard() if config.plan.backend == "native" else LoadBoard()
        self.board = board
        self.fleet = Fleet(
            static_workers(config.fleet.workers), config.fleet, time.monotonic, self._callbacks()
        )
        self.discovery = open_discovery(config.fleet, self.fleet, check_workers)
        self.metrics = RouterMetrics()
        map_metrics = MapMetrics(self.metrics.registry)
        self.maps = MapSources(
            self.holders, config.index, self._is_silent, time.monotonic, map_metrics.switched
        )
        map_metrics.follow(self.maps)
        self.trust = Trust()
        self.deciding = Deciding(
            config,
            Known(
                self._profile,
                self._hash_key,
                self.fleet,
                self.holders,
                self.board,
                self.calibration,
                self.trust,
                self.discovery.priority_of,
            ),
            self.metrics,
            self.maps,
        )
        self.log = self.deciding.log
        self.dispatcher, self.terms, self.models = (
            self.deciding.dispatcher,
            self.deciding.terms,
            self.deciding.models,
        )
        self.room = self.deciding.room
        self.metrics.registry.register(
            StateCollector(self.fleet, self.board, self.holders, self.subscriber, self._silent_workers)
        )
        self.metrics.registry.register(self.discovery)
        self.metrics.registry.register(TrustCollector(self.fleet, self.trust, time.monotonic))

    async def start(self) -> None:
        """Open connections and learn the fleet; returns after every worker was asked once.

        Raises:
            ConfigError: another process writes the index's snapshot.
        """
        claim_snapshot(self.recovery, self.config)
        if self._learnt is not None:
            await self._learnt.start()
        self.subscriber.start()
        await self.recovery.start()
        await self.deciding.start()
        await self.discovery.start()
        await self.fleet.start()

    async def stop(self) -> None:
        """Close everything that ``start`` opened; whoever serves has ended before."""
        await self.discovery.stop()
        await self.fleet.stop()
        await self.recovery.stop()
        self.subscriber.stop()
        if self._learnt is not None:
            await self._learnt.stop()
        await self.deciding.stop()

    def synced(self) -> bool:
        """Whether every source of workers has told them at least once."""
        return self.discovery.synced()

    def _state_file(self, config: Config) -> StateFile | None:
        if self.calibration is None or not config.costs.keep or config.costs.state_file is None:
            return None
        return StateFile(Path(config.costs.state_file), self.calibration, time.monotonic, time.time)

    def _callbacks(self) -> FleetCallbacks:
        return FleetCallbacks(
            on_status=self._on_status,
            on_process_start_time=lambda worker_id, _: self._on_new_process(worker_id),
            on_joined=self._on_joined,
            on_removed=self._on_removed,
            on_restarted=self._on_restarted,
        )

    def _on_joined(self, worker_id: str) -> None:
        self._ingest.joined(self.fleet, worker_id)
        self.deciding.joined(worker_id)

    def _on_status(self, worker_id: str) -> None:
        self._ingest.polled(self.fleet, worker_id)
        status = self.fleet.get(worker_id)
        if status is not None:
            self.maps.polled(status)
        if status is not None and status.sampled_at_s is not None:
            self.board.sampled(worker_id, status.running, status.waiting, status.sampled_at_s)
        if status is not None and status.kv_bytes_per_token is not None:
            self._kv_bytes.observed(worker_id, status.kv_bytes_per_token)

    def _on_new_process(self, worker_id: str) -> None:
        self.board.forget(worker_id)
        self.trust.forget(worker_id)
        self.maps.restarted(worker_id)

    def _on_restarted(self, worker_id: str) -> None:
        self._ingest.restarted(worker_id)
        self._on_new_process(worker_id)

    def _on_removed(self, worker_id: str) -> None:
        self.deciding.recorder.flush()
        self.trust.forget(worker_id)
        self._ingest.removed(worker_id)
        self.maps.forget(worker_id)
        self.board.forget(worker_id)
        self.deciding.removed(worker_id)
        self._kv_bytes.forget(worker_id)
        if self.calibration is not None:
            self.calibration.forget(worker_id)

    def _silent_workers(self) -> set[str]:
        return {worker for worker in list(self.holders.workers()) if self._is_silent(worker)}

    def _is_silent(self, worker: str) -> bool:
        """It answers prompts and publishes none of the events that it should."""
        status, holders = self.fleet.get(worker), self.holders.workers().get(WorkerId(worker))
        if status is None or status.spec.events is None or holders is None:
            return False
        heard_at_s = max(holders.since_s, *(state.applied_at_s or 0.0 for state in holders.ranks))
        return self.dispatcher.block_makers.is_silent(worker, heard_at_s)

    def views(self, served: Served | None = None) -> AdminViews:
        """``served``: who knows of the requests, where it is not this process."""
        return AdminViews(
            fleet=self.fleet,
            board=self.board,
            holders=self.holders,
            subscriber=self.subscriber,
            recovery=self.recovery,
            served=served or ServedHere(self.deciding),
            trust=self.trust,
            profile_name=self.config.costs.profile,
            profile=self._profile,
            calibration=self.calibration,
            learnt=self._learnt,
            kv_bytes=self._kv_bytes,
            hash_key=self._hash_key,
            backend=self.config.index.backend,
            explain=self.dispatcher.explain,
            terms=self.terms,
            silent=self._silent_workers,
            maps=self.maps,
            discovery_troubles=self.discovery.troubles,
            monotonic_s=time.monotonic,
        )
