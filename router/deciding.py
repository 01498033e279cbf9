# SPDX-License-Identifier: Apache-2.0
"""What decides and remembers decisions, over a fleet that is kept in this process or followed from another one."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from indexer.hashing import HashKey
from router.build import log_writer
from router.config import Config
from router.costs.calibration import Calibration
from router.costs.model import CostModel, WatchedCosts
from router.costs.profile import CostProfile
from router.decisions.collector import LogCollector
from router.decisions.constants import constants_id
from router.decisions.inputs import PlanSettings
from router.decisions.log import DecisionLog
from router.decisions.recorder import DecisionRecorder, PricedWith
from router.decisions.reports import ReportDesk
from router.decisions.reports_metrics import ReportMetrics
from router.decisions.trust import Trust
from router.dispatch import Clocks, RequestDispatcher
from router.fleet.fleet import Fleet
from router.gateway.service_terms import ServiceTerms
from router.in_flight import InFlight
from router.map_sources import Maps
from router.metrics import RouterMetrics
from router.plan.decider import Decider
from router.plan.disaggregation import Disaggregation
from router.plan.exploration import Explorer, Exploring
from router.plan.holders import Holders
from router.plan.load import Board
from router.plan.native import NativePlanner
from router.plan.native_board import NativeLoadBoard
from router.plan.native_fleet import NativeFleet
from router.plan.planner import Planner
from router.plan.policies import make_policy
from router.plan.tails import TailReuse
from router.plan.tenants import Tenants
from router.plan.worth import Appraiser
from router.reading import RequestReader
from router.silence import BlockMakers
from router.tokens.service import TokenService, load_local_tokenizers
from router.waiting import WaitingRoom

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """What decisions are made of."""

    profile: CostProfile
    hash_key: HashKey
    fleet: Fleet
    holders: Holders
    board: Board
    calibration: Calibration | None
    """None: the profile's constants are kept."""
    trust: Trust
    priority_of: Callable[[str], int | None]
    """Of an objective by name."""

    @property
    def costs(self) -> WatchedCosts:
        return self.calibration or CostModel(self.profile)


class Deciding:
    """From requests to decisions and their outcomes. ``start`` and ``stop`` run once each, on the loop that serves."""

    def __init__(
        self,
        config: Config,
        known: Known,
        metrics: RouterMetrics,
        maps: Maps,
        block_makers: BlockMakers | None = None,
        in_flight: InFlight | None = None,
    ) -> None:
        """Build everything; nothing is opened yet.

        ``block_makers`` hear of prompts that must have made blocks; ``in_flight`` is of all processes that serve.

        Raises:
            ConfigError: a value that only its user can judge (tokenizer, file of the log).
        """
        self._config = config
        self._known = known
        self.log_writer = log_writer(config)
        self._clocks = Clocks(time.monotonic, time.time, random.Random())
        self.tokens = TokenService(config.tokens, load_local_tokenizers(config.tokens), known.fleet.statuses)
        self.metrics = metrics
        self.metrics.registry.register(LogCollector(self.log_writer))
        self.log = DecisionLog(config.decisions.capacity)
        self.explorer: Explorer | None = None
        self._planner = self._make_planner()
        self._decider = self._make_decider()
        self.recorder = self._recorder()
        self.room = WaitingRoom(
            config.admission, known.fleet, known.board, self.metrics, self._clocks.monotonic_s, in_flight
        )
        self.terms = ServiceTerms(
            Tenants(config.tenants, known.hash_key),
            config.plan.slo_ttft_s,
            config.plan.slo_tpot_s,
            known.priority_of,
        )
        extended = config.fleet.discovers or any(e.extension is not None for e in config.fleet.workers)
        tails = TailReuse() if extended or config.plan.offload == "shared" else None
        self.dispatcher = RequestDispatcher(
            fleet=known.fleet,
            reader=self._reader(),
            decider=self._decider,
            board=known.board,
            recorder=self.recorder,
            metrics=self.metrics,
            clocks=self._clocks,
            calibration=known.calibration,
            room=self.room,
            tails=tails,
            limit_offload=config.plan.offload == "shared",
            appraiser=Appraiser(known.costs, tails, config.plan.pull_deadline_s),
            block_makers=block_makers,
            maps=maps,
        )
        self.reports = ReportDesk(
            self.recorder,
            known.fleet,
            known.calibration,
            ReportMetrics(self.metrics.registry),
            time.monotonic,
        )
        self._probes: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Open connections and the log."""
        if self.log_writer is not None:
            self.log_writer.start()
        await self.tokens.start()

    async def stop(self) -> None:
        """Close everything that ``start`` opened; whoever serves has ended before."""
        for task in list(self._probes):
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        await self.tokens.stop()
        self.recorder.flush()
        if self.log_writer is not None:
            await asyncio.to_thread(self.log_writer.stop)

    def joined(self, worker_id: str) -> None:
        """A worker answers, for the first time or again."""
        if self._config.tokens.probe:
            task = asyncio.get_running_loop().create_task(self._probe(worker_id))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    def removed(self, worker_id: str) -> None:
        """It left the fleet."""
        self.tokens.forget(worker_id)
        self.dispatcher.block_makers.forget(worker_id)

    def index_replaced(self) -> None:
        """``Known.holders`` are those of another index: what the native planner has of the one before is thrown away."""
        self._decider.fleet = self._native_fleet()

    def models(self) -> bytes:
        """``GET /v1/models``: the union of what the workers serve."""
        rows: dict[str, dict[str, object]] = {}
        for status in self._known.fleet.statuses():
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

    async def _probe(self, worker_id: str) -> None:
        parity = await self.tokens.probe(worker_id)
        _log.info("worker %s: tokenizer parity %s", worker_id, parity.value)

    def _reader(self) -> RequestReader:
        return RequestReader(
            self.tokens,
            self._known.fleet,
            self.metrics,
            time.monotonic,
            needs_tokens=self._config.plan.policy == "kv_aware",
            trust_transfer_params=self._config.gateway.trust_transfer_params,
        )

    def _make_decider(self) -> Decider:
        config, known, planner = self._config, self._known, self._planner
        policy = make_policy(config.plan.policy, planner)
        if known.calibration is not None and config.plan.policy == "kv_aware" and config.plan.explore > 0:
            self.explorer = Explorer(known.calibration, config.plan.explore)
            policy = Exploring(policy, planner, self.explorer)
        return Decider(
            known.holders,
            known.board,
            policy,
            use_peers=config.plan.use_peers,
            disaggregation=Disaggregation(planner, known.costs, config.plan.gpu_seconds_weight),
            trust=known.trust.of,
            fleet=self._native_fleet(),
            allow_unfingerprinted_peers=config.plan.allow_unfingerprinted_peers,
            speculative_s=config.plan.speculative_s,
        )

    def _make_planner(self) -> Planner:
        plan = self._config.plan
        planner = NativePlanner if plan.backend == "native" else Planner
        return planner(self._known.costs, plan.gpu_seconds_weight, plan.pull_deadline_s, plan.min_pull_tokens)

    def _native_fleet(self) -> NativeFleet | None:
        """None where questions are put together in Python: for another policy, or over the index in Python."""
        config, known, planner = self._config, self._known, self._planner
        if not isinstance(planner, NativePlanner) or not isinstance(known.board, NativeLoadBoard):
            return None
        if config.plan.policy != "kv_aware" or config.index.backend != "native":
            return None
        return NativeFleet(
            known.holders,
            known.board,
            known.costs,
            planner.settings,
            use_peers=config.plan.use_peers,
            trust=known.trust,
            allow_unfingerprinted_peers=config.plan.allow_unfingerprinted_peers,
            speculative_s=config.plan.speculative_s,
        )

    def _recorder(self) -> DecisionRecorder:
        config, known = self._config, self._known
        plan = config.plan
        return DecisionRecorder(
            log=self.log,
            priced_with=PricedWith(
                known.costs,
                constants_id(config.costs.profile, known.profile),
                PlanSettings(plan.gpu_seconds_weight, plan.pull_deadline_s, plan.min_pull_tokens),
            ),
            trust=known.trust,
            metrics=self.metrics,
            unix_s=time.time,
            writer=self.log_writer,
        )
