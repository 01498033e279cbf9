# SPDX-License-Identifier: Apache-2.0
"""A dispatcher on real parts; only time and chance are the test's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from kv_batches import KEY_BYTES, batch, placeholder, stored

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index
from router.config_fleet import FleetConfig
from router.config_sections import TokensConfig
from router.costs.calibration import Calibration
from router.costs.profile import load_profile
from router.decisions.constants import constants_id
from router.decisions.inputs import PlanSettings
from router.decisions.log import DecisionLog
from router.decisions.log_writer import LogWriter
from router.decisions.recorder import DecisionRecorder, PricedWith
from router.decisions.trust import Trust
from router.dispatch import Clocks, RequestDispatcher
from router.fleet.fleet import Fleet
from router.fleet.metrics_text import WorkerMetrics
from router.fleet.poller import PollResult, Reach
from router.fleet.worker import ModelInfo, WorkerSpec
from router.gateway.parse import parse_request
from router.metrics import RouterMetrics
from router.outcomes import RoutedAttempt
from router.plan.decider import Decider
from router.plan.load import LoadBoard
from router.plan.planner import Planner
from router.plan.policies import PolicyName, make_policy
from router.plan.tails import TailReuse
from router.plan.worth import Appraiser
from router.reading import RequestReader
from router.request import InferenceRequest
from router.tokens.service import TokenService

MODEL = "m"
BLOCK = 16


@dataclass
class Desk:
    """A dispatcher, what it works with, and a clock that stands still until told."""

    policy: PolicyName = "kv_aware"
    trust_transfer_params: bool = False
    now_s: float = 1000.0
    served: int = 0
    calibration: Calibration = field(init=False)
    holders: HolderTable = field(init=False)
    board: LoadBoard = field(init=False)
    fleet: Fleet = field(init=False)
    metrics: RouterMetrics = field(init=False)
    log: DecisionLog = field(init=False)
    trust: Trust = field(init=False)
    recorder: DecisionRecorder = field(init=False)
    writer: LogWriter | None = None
    tails: TailReuse | None = None
    limit_offload: bool = True
    dispatcher: RequestDispatcher = field(init=False)

    def __post_init__(self) -> None:
        self.holders = HolderTable(open_index(HashKey(KEY_BYTES), IndexLimits()), self.clock)
        self.board, self.metrics, self.log = LoadBoard(), RouterMetrics(), DecisionLog(100)
        self.fleet = Fleet([], FleetConfig(), self.clock)
        self.calibration = Calibration(load_profile("default", {}))
        planner = Planner(self.calibration, 0.1, 5.0)
        self.trust = Trust()
        self.recorder = DecisionRecorder(
            log=self.log,
            priced_with=PricedWith(
                self.calibration,
                constants_id("default", self.calibration.profile),
                PlanSettings(0.1, 5.0, 0),
            ),
            trust=self.trust,
            metrics=self.metrics,
            unix_s=lambda: 1_700_000_000.0,
            writer=self.writer,
        )
        self.dispatcher = RequestDispatcher(
            fleet=self.fleet,
            reader=RequestReader(
                TokenService(TokensConfig(), {}, self.fleet.statuses),
                self.fleet,
                self.metrics,
                self.clock,
                needs_tokens=self.policy == "kv_aware",
                trust_transfer_params=self.trust_transfer_params,
            ),
            decider=Decider(
                self.holders,
                self.board,
                make_policy(self.policy, planner),
                use_peers=True,
                trust=self.trust.of,
            ),
            board=self.board,
            recorder=self.recorder,
            metrics=self.metrics,
            clocks=Clocks(self.clock, lambda: 1_700_000_000.0, Random(1)),
            calibration=self.calibration,
            tails=self.tails,
            limit_offload=self.limit_offload,
            appraiser=Appraiser(self.calibration, self.tails, 5.0),
        )

    def clock(self) -> float:
        return self.now_s

    def add(
        self,
        worker: str,
        *,
        ranks: int = 1,
        p2p: str | None = None,
        extension: str | None = None,
        events: bool = True,
    ) -> None:
        """A healthy worker that has been polled once."""
        self.fleet.add(WorkerSpec(worker, f"http://{worker}", ranks=ranks, p2p=p2p, extension=extension))
        metrics = WorkerMetrics(running=0, waiting=0, block_size_tokens=BLOCK)
        models = {MODEL: ModelInfo(MODEL, MODEL), "lora": ModelInfo("lora", MODEL, "lora")}
        member = self.fleet._members[worker]
        self.fleet._apply(member, PollResult(Reach.OK, None, metrics, models), self.now_s)
        if events:
            self.holders.register(WorkerId(worker), MODEL, ranks)

    def store(
        self, worker: str, tokens: list[int], *, rank: int = 0, in_ram: bool = False, lora: str | None = None
    ) -> None:
        """Tell the index of blocks that begin a prompt."""
        names = list(range(1, len(tokens) // BLOCK + 1))
        whole = tokens[: len(names) * BLOCK]
        event = stored(names, whole, block_size=BLOCK, lora_name=lora)
        events = [event, placeholder(names)] if in_ram else [event]
        self.served += 1
        place = WorkerRank(WorkerId(worker), rank)
        self.holders.apply(place, self.served, batch(*events, rank=rank))

    def request(
        self,
        body: dict[str, Any] | bytes,
        path: str = "/v1/completions",
        headers: dict[str, str] | None = None,
    ) -> InferenceRequest:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.served += 1
        pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        return parse_request("POST", path, pairs, raw, f"r{self.served}")

    async def dispatch(
        self, body: dict[str, Any] | bytes, path: str = "/v1/completions", tried: frozenset[str] = frozenset()
    ) -> RoutedAttempt:
        attempt = await self.dispatcher.dispatch(self.request(body, path), tried)
        assert isinstance(attempt, RoutedAttempt)
        return attempt

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def desk() -> Desk:
    return Desk()
