# SPDX-License-Identifier: Apache-2.0
"""A fleet of simulated engines in virtual time, routed by the router's own decider.

What is real: the decider, the load board, the index with its native decoder, the event bytes. What is virtual:
the clock and the network. Events reach the index at the instant they are published. Deterministic for a seed.

Each engine has storage of its own, as a local disk: the index keeps one store per worker.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from engine_ext.sim.config import SimConfig
from engine_ext.sim.core import SimEngine
from engine_ext.sim.events import BatchEncoder
from engine_ext.sim.output import PeerLookup, StepOutput
from engine_ext.sim.profile import SimProfile
from engine_ext.sim.request import SimRequest
from engine_ext.sim.tiers import StorageTier
from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import Namespace, WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index
from router.costs.calibration import Calibration
from router.costs.model import CostModel
from router.costs.profile import CostProfile
from router.fleet.worker import Health, WorkerSpec, WorkerStatus
from router.plan.candidate import Plan
from router.plan.decider import Decider, Prompts
from router.plan.exploration import Explorer, Exploring
from router.plan.load import LoadBoard
from router.plan.observed import Decoding, begin_decoding, decode_observation, observation
from router.plan.planner import Planner
from router.plan.policies import Policy
from router.plan.transfer_params import transfer_params
from router.replay.arrivals import Arrivals, TraceArrivals
from router.replay.oracle import JudgedPolicy, Oracle
from router.replay.policies import AnyPolicyName, make_replay_policy
from router.replay.scrape import Scraper
from router.replay.traces import TraceRequest, prompt_tokens

MODEL = "trace-model"
_REPLAY_KEY = HashKey(bytes(16))  # nothing of a replay leaves the process
_PEER_PORT = 1
_NEVER_S = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualFleetSetup:
    """Everything a replay depends on."""

    workers: int
    engine: SimConfig
    engine_profile: SimProfile
    cost_profile: CostProfile
    policy: AnyPolicyName
    gpu_seconds_weight: float = 0.1
    pull_deadline_s: float = 5.0
    use_peers: bool = True
    calibrate: bool = False
    """Learn the constants from the answers; ``cost_profile`` is then where they start."""
    explore: float = 0.0
    """Of the predicted costs, what trials may lose; none without ``calibrate``."""
    endless_storage: bool = False
    """A disk per worker that never evicts, as vLLM's own ``fs`` tier; ``engine.storage_blocks`` bounds it instead."""
    events_cut_at_s: Mapping[str, float] = field(default_factory=dict)
    """Worker to when its event channel breaks: what it publishes after that never arrives."""
    seed: int = 0
    judge: frozenset[int] = frozenset()
    """Indices of the requests whose decisions are compared with all others, on copies of the fleet."""


@dataclass(slots=True)
class ReplayedRequest:
    """One request and what became of it."""

    worker: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    predicted_cached_tokens: int
    predicted_ttft_s: float
    source: str | None
    ticket: int
    ttft_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    index: int = 0
    """The request's own."""
    decoding: Decoding | None = None
    """How its worker was when the answer began."""


class VirtualFleet:
    """Replays requests; ``run`` may be called once."""

    def __init__(self, setup: VirtualFleetSetup) -> None:
        self._now_s = 0.0
        self._random = Random(setup.seed)
        self._encoder = BatchEncoder()
        self.holders = HolderTable(open_index(_REPLAY_KEY, IndexLimits()), lambda: self._now_s)
        self._board = LoadBoard()
        self.calibration = Calibration(setup.cost_profile) if setup.calibrate else None
        costs = self.calibration or CostModel(setup.cost_profile)
        planner = Planner(costs, setup.gpu_seconds_weight, setup.pull_deadline_s)
        self._plans: dict[str, Plan] = {}
        self.engines = {f"w{i}": _engine(setup) for i in range(setup.workers)}
        kv_capacity_tokens = setup.engine.hbm_blocks * setup.engine.block_size_tokens
        self._scraper = Scraper(lambda: self._now_s)
        oracle = Oracle(planner, self.first_token_if)
        policy: Policy = oracle
        if setup.policy != "oracle":
            policy = make_replay_policy(setup.policy, planner, kv_capacity_tokens, self._scraper)
        self.explorer: Explorer | None = None
        if self.calibration is not None and setup.policy == "kv_aware" and setup.explore > 0:
            self.explorer = Explorer(self.calibration, setup.explore)
            policy = Exploring(policy, planner, self.explorer)
        judged = JudgedPolicy(policy, oracle, lambda: self._asked[0].index, setup.judge)
        self.judged = judged.judged
        policy = judged if setup.judge else policy
        self._decider = Decider(self.holders, self._board, policy, use_peers=setup.use_peers)
        self._events_cut_at_s = setup.events_cut_at_s
        self._statuses = [self._status(name, setup.engine) for name in self.engines]
        self._seq = dict.fromkeys(self.engines, 0)
        self._arrivals: Arrivals = TraceArrivals(())
        self._asked: tuple[TraceRequest, array[int]]
        """The request that is being decided, and its prompt."""
        self._requests: dict[str, ReplayedRequest] = {}
        # (time, worker): when an engine wants to be advanced; entries that are not in _wake_at_s are out of date.
        self._wakes: list[tuple[float, str]] = []
        self._wake_at_s: dict[str, float] = {}
        for name in self.engines:
            self.holders.register(WorkerId(name), MODEL, 1)

    def run(self, requests: Iterable[TraceRequest]) -> list[ReplayedRequest]:
        """Replay them in order of arrival until all are answered."""
        return self.replay(TraceArrivals(requests))

    def replay(self, arrivals: Arrivals) -> list[ReplayedRequest]:
        """Replay until nothing more arrives and all are answered."""
        self._arrivals = arrivals
        while (next_s := arrivals.next_s) is not None or self._wakes:
            if next_s is None or (self._wakes and self._wakes[0][0] <= next_s):
                self._step()
                continue
            self._now_s = max(self._now_s, next_s)
            self._submit(arrivals.take())
        return list(self._requests.values())

    def _status(self, name: str, engine: SimConfig) -> WorkerStatus:
        p2p = f"{name}:{_PEER_PORT}" if engine.offloads else None
        return WorkerStatus(
            WorkerSpec(name, f"http://{name}", p2p=p2p),
            health=Health.HEALTHY,
            answering=True,
            block_size_tokens=engine.block_size_tokens,
        )

    def _submit(self, request: TraceRequest) -> None:
        ids = prompt_tokens(request)
        self._asked = request, ids
        prompts = Prompts([ids], Namespace(MODEL))
        decision = self._decider.decide(
            prompts, self._statuses, self._statuses, self._now_s, self._random, explore=True
        )
        self._dispatch(decision.planned.chosen)

    def _dispatch(self, plan: Plan) -> ReplayedRequest:
        """Send the request that is being decided as planned."""
        request, ids = self._asked
        source = plan.source.worker if plan.source else None
        ticket = self._board.promise(
            plan.worker,
            plan.dp_rank,
            plan.terms.prefill_s,
            plan.terms.total_s,
            self._now_s,
            source,
            prompt_tokens=len(ids),
            missing_tokens=max(len(ids) - plan.cached_tokens, 1),
        )
        name = f"r{request.index}"
        replayed = self._requests[name] = ReplayedRequest(
            worker=plan.worker,
            arrival_s=self._now_s,
            prompt_tokens=len(ids),
            output_tokens=request.output_tokens,
            predicted_cached_tokens=plan.cached_tokens,
            predicted_ttft_s=plan.terms.total_s,
            source=source,
            ticket=ticket,
            index=request.index,
        )
        if self.calibration is not None:
            self._plans[name] = plan
        engine = self.engines[plan.worker]
        engine.submit(
            SimRequest(
                request_id=name,
                token_ids=ids,
                max_tokens=request.output_tokens,
                kv_transfer_params=transfer_params(plan, name),
            ),
            self._now_s,
        )
        self._wake(plan.worker)
        return replayed

    def first_token_if(self, plan: Plan) -> float:
        """Seconds to the first token of the request being decided, were it sent as planned and nothing came after.

        Spends the fleet: to be called on a copy of it.
        """
        self._arrivals = TraceArrivals(())
        replayed = self._dispatch(plan)
        while replayed.ttft_s is None and self._wakes:
            self._step()
        return float("inf") if replayed.ttft_s is None else replayed.ttft_s

    def _wake(self, worker: str) -> None:
        """Advance an engine when it next has something to do."""
        due_s = self.engines[worker].next_event_s()
        if due_s is not None and due_s < self._wake_at_s.get(worker, _NEVER_S):
            self._wake_at_s[worker] = due_s
            heapq.heappush(self._wakes, (due_s, worker))

    def _step(self) -> None:
        """Advance the engine that is due next."""
        due_s, worker = heapq.heappop(self._wakes)
        if self._wake_at_s.get(worker) != due_s:
            return  # it was due earlier after all, and has been advanced
        del self._wake_at_s[worker]
        engine = self.engines[worker]
        wanted_s = engine.next_event_s()
        if wanted_s is not None and wanted_s <= due_s:
            self._now_s = max(self._now_s, due_s)
            self._take(worker, engine.advance(due_s))
            self._scraper.step_ended(worker, engine.metrics())
        self._wake(worker)

    def _take(self, worker: str, output: StepOutput) -> None:
        for lookup in output.lookups:
            self._answer(worker, lookup)
        cut = self._now_s >= self._events_cut_at_s.get(worker, float("inf"))
        for events in output.kv_batches if not cut else ():
            payload = self._encoder.encode(self._now_s, events)
            self.holders.apply(WorkerRank(WorkerId(worker)), self._seq[worker], payload)
            self._seq[worker] += 1
        for token in output.tokens:
            if token.first:
                replayed = self._requests[token.request_id]
                replayed.ttft_s = self._now_s - replayed.arrival_s
                self._board.first_token(replayed.ticket, self._now_s)
                replayed.decoding = begin_decoding(self._board, worker, 0, self._now_s)
        for finished in output.finished:
            replayed = self._requests[finished.request_id]
            replayed.finished_s = self._now_s
            replayed.cached_tokens = finished.usage.cached_tokens
            replayed.cached_by_tier = {
                tier.value: tokens for tier, tokens in finished.usage.cached_by_tier.items()
            }
            self._learn_decode(worker, replayed)
            self._board.release(replayed.ticket, self._now_s)
            self._learn(finished.request_id, replayed)
            self._arrivals.finished(replayed.index, self._now_s)

    def _learn_decode(self, worker: str, replayed: ReplayedRequest) -> None:
        if self.calibration is not None and replayed.decoding is not None:
            begun, tokens = replayed.decoding, replayed.output_tokens
            seen = decode_observation(self._board, worker, 0, begun, tokens, self._now_s)
            self.calibration.observe_decode(seen, self._now_s)

    def _learn(self, name: str, replayed: ReplayedRequest) -> None:
        """As the live router does: when the usage of an answer is known."""
        plan = self._plans.pop(name, None)
        if self.calibration is None or plan is None:
            return
        if replayed.ttft_s is not None and replayed.cached_tokens is not None:
            seen = observation(plan, replayed.prompt_tokens, replayed.cached_tokens, replayed.ttft_s)
            self.calibration.observe(seen, self._now_s)

    def _answer(self, worker: str, lookup: PeerLookup) -> None:
        peer = self.engines[lookup.host]
        answer = peer.serve_lookup(lookup.block_hashes, self._now_s)
        self.engines[worker].answer_lookup(lookup.request_id, answer.hits, self._now_s, wait_s=answer.wait_s)


def _engine(setup: VirtualFleetSetup) -> SimEngine:
    storage = StorageTier() if setup.endless_storage else None
    return SimEngine(setup.engine, setup.engine_profile, storage, every_token=False)
