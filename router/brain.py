# SPDX-License-Identifier: Apache-2.0
"""Everything that decides and remembers, behind whichever door requests come in: gateway or endpoint picker."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from indexer.holders import HolderTable
from indexer.identity import WorkerId
from indexer.index import open_index
from indexer.snapshot.recovery import IndexRecovery
from indexer.subscriber import EventSubscriber
from router.admin.views import AdminViews
from router.build import hash_key, limits, log_writer, profile, recovery
from router.config import Config
from router.config_fleet import WorkerEntry
from router.costs.calibration import Calibration
from router.costs.kv_report import KvBytesReport
from router.costs.model import CostModel, Costs, WatchedCosts
from router.costs.state_file import StateFile
from router.decisions.collector import DecisionsCollector
from router.decisions.constants import constants_id
from router.decisions.inputs import PlanSettings
from router.decisions.log import DecisionLog
from router.decisions.recorder import DecisionRecorder, PricedWith
from router.decisions.reports import ReportDesk
from router.decisions.reports_metrics import ReportMetrics
from router.decisions.trust import Trust
from router.dispatch import Clocks, RequestDispatcher
from router.fleet.discovery.sources import open_discovery
from router.fleet.fleet import Fleet, FleetCallbacks
from router.fleet.phases import check_phases
from router.fleet.static import static_workers
from router.gateway.service_terms import ServiceTerms
from router.ingest import WorkerIngest
from router.map_metrics import MapMetrics
from router.map_sources import MapSources
from router.metrics import RouterMetrics, StateCollector
from router.plan.decider import Decider
from router.plan.disaggregation import Disaggregation
from router.plan.exploration import Explorer, Exploring
from router.plan.load import Board, LoadBoard
from router.plan.native import NativePlanner
from router.plan.native_board import NativeLoadBoard
from router.plan.native_fleet import NativeFleet
from router.plan.planner import Planner
from router.plan.policies import make_policy
from router.plan.tails import TailReuse
from router.plan.tenants import Tenants
from router.plan.worth import Appraiser
from router.reading import RequestReader
from router.tokens.service import TokenService, load_local_tokenizers
from router.waiting import WaitingRoom

_log = logging.getLogger(__name__)


class Brain:
    """The service without its servers.

    ``start`` and ``stop`` run once each, on the event loop that serves.
    """

    def __init__(
        self, config: Config, check_workers: Callable[[Sequence[WorkerEntry], str], None] | None = None
    ) -> None:
        """Build everything; nothing is opened yet. ``check_workers`` may refuse entries of ``fleet.file``.

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
        self._explorer: Explorer | None = None
        self._hash_key = hash_key(config)
        self.log_writer = log_writer(config)
        local = load_local_tokenizers(config.tokens)
        self._clocks = Clocks(time.monotonic, time.time, random.Random())
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
        self._ingest = WorkerIngest(self.holders, self.subscriber, self.recovery.recalled)
        self.board: Board = NativeLoadBoard() if config.plan.backend == "native" else LoadBoard()
        self.fleet = Fleet(
            static_workers(config.fleet.workers), config.fleet, time.monotonic, self._callbacks()
        )
        self.discovery = open_discovery(config.fleet, self.fleet, check_workers)
        self.tokens = TokenService(config.tokens, local, self.fleet.statuses)
        self.metrics = RouterMetrics()
        self._map_metrics = MapMetrics(self.metrics.registry)
        self.maps = MapSources(
            self.holders, config.index, self._is_silent, time.monotonic, self._map_metrics.switched
        )
        self._map_metrics.follow(self.maps)
        self.log = DecisionLog(config.decisions.capacity)
        self.trust = Trust()
        self.recorder = self._recorder(config)
        self.room = WaitingRoom(
            config.admission, self.fleet, self.board, self.metrics, self._clocks.monotonic_s
        )
        self.terms = ServiceTerms(
            Tenants(config.tenants, self._hash_key),
            config.plan.slo_ttft_s,
            config.plan.slo_tpot_s,
            self.discovery.priority_of,
        )
        extended = config.fleet.discovers or any(e.extension is not None for e in config.fleet.workers)
        tails = TailReuse() if extended or config.plan.offload == "shared" else None
        self.dispatcher = RequestDispatcher(
            fleet=self.fleet,
            reader=self._reader(config),
            decider=self._decider(config),
            board=self.board,
            recorder=self.recorder,
            metrics=self.metrics,
            clocks=self._clocks,
            calibration=self.calibration,
            room=self.room,
            tails=tails,
            limit_offload=config.plan.offload == "shared",
            appraiser=Appraiser(
                self.calibration or CostModel(self._profile), tails, config.plan.pull_deadline_s
            ),
            maps=self.maps,
        )
        self.metrics.registry.register(
            StateCollector(self.fleet, self.board, self.holders, self.subscriber, self._silent_workers)
        )
        self.metrics.registry.register(self.discovery)
        self.metrics.registry.register(
            DecisionsCollector(self.fleet, self.trust, self.log_writer, time.monotonic)
        )
        self.reports = ReportDesk(
            self.recorder,
            self.fleet,
            self.calibration,
            ReportMetrics(self.metrics.registry),
            time.monotonic,
        )
        self._probes: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Open connections and learn the fleet; returns after every worker was asked once."""
        if self.log_writer is not None:
            self.log_writer.start()
        if self._learnt is not None:
            await self._learnt.start()
        self.subscriber.start()
        await self.recovery.start()
        await self.tokens.start()
        await self.discovery.start()
        await self.fleet.start()

    async def stop(self) -> None:
        """Close everything that ``start`` opened; whoever serves has ended before."""
        await self.discovery.stop()
        await self.fleet.stop()
        for task in list(self._probes):
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        await self.tokens.stop()
        await self.recovery.stop()
        self.subscriber.stop()
        if self._learnt is not None:
            await self._learnt.stop()
        self.recorder.flush()
        if self.log_writer is not None:
            await asyncio.to_thread(self.log_writer.stop)

    def _reader(self, config: Config) -> RequestReader:
        return RequestReader(
            self.tokens,
            self.fleet,
            self.metrics,
            time.monotonic,
            needs_tokens=config.plan.policy == "kv_aware",
            trust_transfer_params=config.gateway.trust_transfer_params,
        )

    def _decider(self, config: Config) -> Decider:
        costs = self.calibration or CostModel(self._profile)
        planner = self._planner(config, costs)
        policy = make_policy(config.plan.policy, planner)
        if self.calibration is not None and config.plan.policy == "kv_aware" and config.plan.explore > 0:
            self._explorer = Explorer(self.calibration, config.plan.explore)
            policy = Exploring(policy, planner, self._explorer)
        disaggregation = Disaggregation(planner, costs, config.plan.gpu_seconds_weight)
        return Decider(
            self.holders,
            self.board,
            policy,
            use_peers=config.plan.use_peers,
            disaggregation=disaggregation,
            trust=self.trust.of,
            fleet=self._native_fleet(config, planner, costs),
            allow_unfingerprinted_peers=config.plan.allow_unfingerprinted_peers,
        )

    def _planner(self, config: Config, costs: Costs) -> Planner:
        planner = NativePlanner if config.plan.backend == "native" else Planner
        plan = config.plan
        return planner(costs, plan.gpu_seconds_weight, plan.pull_deadline_s, plan.min_pull_tokens)

    def _native_fleet(self, config: Config, planner: Planner, costs: WatchedCosts) -> NativeFleet | None:
        """None where questions are put together in Python: for another policy, or over the index in Python."""
        if not isinstance(planner, NativePlanner) or not isinstance(self.board, NativeLoadBoard):
            return None
        if config.plan.policy != "kv_aware" or config.index.backend != "native":
            return None
        return NativeFleet(
            self.holders,
            self.board,
            costs,
            planner.settings,
            use_peers=config.plan.use_peers,
            trust=self.trust,
            allow_unfingerprinted_peers=config.plan.allow_unfingerprinted_peers,
        )

    def _recorder(self, config: Config) -> DecisionRecorder:
        plan = config.plan
        return DecisionRecorder(
            log=self.log,
            priced_with=PricedWith(
                self.calibration or CostModel(self._profile),
                constants_id(config.costs.profile, self._profile),
                PlanSettings(plan.gpu_seconds_weight, plan.pull_deadline_s, plan.min_pull_tokens),
            ),
            trust=self.trust,
            metrics=self.metrics,
            unix_s=time.time,
            writer=self.log_writer,
        )

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
        if self.config.tokens.probe:
            task = asyncio.get_running_loop().create_task(self._probe(worker_id))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    async def _probe(self, worker_id: str) -> None:
        parity = await self.tokens.probe(worker_id)
        _log.info("worker %s: tokenizer parity %s", worker_id, parity.value)

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
        self.recorder.flush()
        self.trust.forget(worker_id)
        self._ingest.removed(worker_id)
        self.maps.forget(worker_id)
        self.tokens.forget(worker_id)
        self.board.forget(worker_id)
        self.dispatcher.block_makers.forget(worker_id)
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

    def views(self) -> AdminViews:
        return AdminViews(
            fleet=self.fleet,
            board=self.board,
            holders=self.holders,
            subscriber=self.subscriber,
            recovery=self.recovery,
            log=self.log,
            log_writer=self.log_writer,
            trust=self.trust,
            profile_name=self.config.costs.profile,
            profile=self._profile,
            calibration=self.calibration,
            learnt=self._learnt,
            kv_bytes=self._kv_bytes,
            explorer=self._explorer,
            hash_key=self._hash_key,
            backend=self.config.index.backend,
            registry=self.metrics.registry,
            explain=self.dispatcher.explain,
            take_reports=self.reports.take,
            terms=self.terms,
            queue=self.room.view,
            silent=self._silent_workers,
            maps=self.maps,
            discovery_troubles=self.discovery.troubles,
            monotonic_s=time.monotonic,
        )

    def models(self) -> bytes:
        """``GET /v1/models``: the union of what the workers serve."""
        rows: dict[str, dict[str, object]] = {}
        for status in self.fleet.statuses():
            for info in status.models.values():
                rows.setdefault(
                    info.name,
                    {
                        "id": info.name,
                        "object": "model",
                        "owned_by": "pointsman",
                        "root": info.root,
                        "parent": info.base if info.lora else None,
                        "max_model_len": info.max_model_len,
                    },
                )
        return msgspec.json.encode({"object": "list", "data": list(rows.values())})
