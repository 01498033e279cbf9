# SPDX-License-Identifier: Apache-2.0
"""The composition root: one configuration in, one running service out. Nothing else builds these objects."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from indexer.errors import HashKeyError
from indexer.hashing import HashKey, load_or_make_key
from indexer.holders import HolderTable
from indexer.index import IndexLimits, open_index
from indexer.subscriber import EventSubscriber
from router.admin.api import make_admin_app
from router.admin.views import AdminViews
from router.config import Config
from router.costs.calibration import Calibration
from router.costs.model import CostModel
from router.costs.profile import load_profile
from router.decisions.log import DecisionLog
from router.dispatch import Clocks, RequestDispatcher
from router.errors import ConfigError
from router.fleet.fleet import Fleet, FleetCallbacks
from router.fleet.static import static_workers
from router.gateway.proxy import GatewayApp
from router.gateway.settings import GatewaySettings
from router.gateway.upstream import UpstreamClient
from router.ingest import WorkerIngest
from router.metrics import RouterMetrics, StateCollector
from router.plan.decider import Decider
from router.plan.load import LoadBoard
from router.plan.planner import Planner
from router.plan.policies import make_policy
from router.tokens.service import TokenService, load_local_tokenizers

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class PointsmanApp:
    """The service as an ASGI app: ``/v1/*`` to the gateway, the rest to the admin app.

    ``start`` and ``stop`` run once each, on the event loop that serves; the lifespan calls them.
    """

    def __init__(self, config: Config) -> None:
        """Build everything; nothing is opened yet.

        Raises:
            ConfigError: a value that only its user can judge (profile, tokenizer, key file).
        """
        self.config = config
        _check_roles(config)
        self._profile = load_profile(config.costs.profile, config.costs.overrides)
        self.calibration = Calibration(self._profile) if config.costs.calibrate else None
        self._hash_key = _hash_key(config)
        local = load_local_tokenizers(config.tokens)
        self._clocks = Clocks(time.monotonic, time.time, random.Random())
        index = open_index(self._hash_key, _limits(config), config.index.backend)
        self.holders = HolderTable(index, time.monotonic)
        self.subscriber = EventSubscriber(self.holders, time.monotonic, config.index.replay_timeout_s)
        self._ingest = WorkerIngest(self.holders, self.subscriber)
        self.board = LoadBoard()
        self.fleet = Fleet(
            static_workers(config.fleet.workers), config.fleet, time.monotonic, self._callbacks()
        )
        self.tokens = TokenService(config.tokens, local, self.fleet.statuses)
        self.metrics = RouterMetrics()
        self.log = DecisionLog(config.decisions.capacity)
        self.dispatcher = RequestDispatcher(
            fleet=self.fleet,
            tokens=self.tokens,
            decider=self._decider(config),
            board=self.board,
            log=self.log,
            metrics=self.metrics,
            clocks=self._clocks,
            trust_transfer_params=config.gateway.trust_transfer_params,
            calibration=self.calibration,
        )
        self.metrics.registry.register(
            StateCollector(self.fleet, self.board, self.holders, self.subscriber, self._silent_workers)
        )
        self._admin = make_admin_app(self._views(), config.admin.token, enabled=config.admin.enabled)
        self._probes: set[asyncio.Task[None]] = set()
        self._upstream: UpstreamClient | None = None
        self._gateway: GatewayApp | None = None

    async def start(self) -> None:
        """Open connections and learn the fleet; returns after every worker was asked once."""
        settings = GatewaySettings(
            max_body_bytes=self.config.gateway.max_body_bytes,
            connect_timeout_s=self.config.gateway.connect_timeout_s,
            idle_timeout_s=self.config.gateway.idle_timeout_s,
            retries=self.config.gateway.retries,
        )
        self._upstream = UpstreamClient(settings)
        self._gateway = GatewayApp(self.dispatcher, self._upstream, settings, models=self._models)
        self.subscriber.start()
        await self.tokens.start()
        await self.fleet.start()

    async def stop(self) -> None:
        """Close everything that ``start`` opened."""
        await self.fleet.stop()
        for task in list(self._probes):
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        await self.tokens.stop()
        self.subscriber.stop()
        if self._upstream is not None:
            await self._upstream.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http" and scope["path"].startswith("/v1/") and self._gateway is not None:
            await self._gateway(scope, receive, send)
        else:
            await self._admin(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.start()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    def _decider(self, config: Config) -> Decider:
        planner = Planner(
            self.calibration or CostModel(self._profile),
            config.plan.gpu_seconds_weight,
            config.plan.pull_deadline_s,
            config.plan.min_pull_tokens,
        )
        policy = make_policy(config.plan.policy, planner)
        return Decider(self.holders, self.board, policy, use_peers=config.plan.use_peers)

    def _callbacks(self) -> FleetCallbacks:
        return FleetCallbacks(
            on_status=self._on_status,
            on_process_start_time=lambda worker_id, _: self.board.forget(worker_id),
            on_joined=self._on_joined,
            on_removed=self._on_removed,
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
        if status is not None and status.sampled_at_s is not None:
            self.board.sampled(worker_id, status.running, status.waiting, status.sampled_at_s)

    def _on_removed(self, worker_id: str) -> None:
        self._ingest.removed(worker_id)
        self.tokens.forget(worker_id)
        self.board.forget(worker_id)
        self.dispatcher.forget(worker_id)
        if self.calibration is not None:
            self.calibration.forget(worker_id)

    def _silent_workers(self) -> set[str]:
        return {
            worker
            for worker, holders in self.holders.workers().items()
            if self.dispatcher.is_silent(
                worker, max(holders.since_s, *(state.applied_at_s or 0.0 for state in holders.ranks))
            )
        }

    def _views(self) -> AdminViews:
        return AdminViews(
            fleet=self.fleet,
            board=self.board,
            holders=self.holders,
            subscriber=self.subscriber,
            log=self.log,
            profile_name=self.config.costs.profile,
            profile=self._profile,
            calibration=self.calibration,
            hash_key=self._hash_key,
            backend=self.config.index.backend,
            registry=self.metrics.registry,
            explain=self.dispatcher.explain,
            silent=self._silent_workers,
            monotonic_s=time.monotonic,
        )

    def _models(self) -> bytes:
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


def _check_roles(config: Config) -> None:
    """Prefill and decode workers need both legs of a split request; whole requests would be wrong there."""
    for position, entry in enumerate(config.fleet.workers):
        if entry.role != "both":
            field = f"fleet.workers[{position}].role"
            raise ConfigError(field, entry.role, "both (this version does not split prefill from decode)")


def _limits(config: Config) -> IndexLimits:
    return IndexLimits(
        detached_blocks=config.index.max_detached_blocks,
        unidentified_blocks=config.index.max_unidentified_blocks,
    )


def _hash_key(config: Config) -> HashKey:
    path = config.index.hash_key_file or ""
    try:
        return load_or_make_key(Path(path))
    except HashKeyError as error:
        raise ConfigError("index.hash_key_file", path, f"a key file ({error})") from error
