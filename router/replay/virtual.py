# SPDX-License-Identifier: Apache-2.0
"""A fleet of simulated engines in virtual time, routed by the router's own decider.

What is real: the decider, the load board, the index with its native decoder, the event bytes. What is virtual:
the clock and the network. Events reach the index at the instant they are published. Deterministic for a seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from engine_ext.sim.config import SimConfig
from engine_ext.sim.core import SimEngine
from engine_ext.sim.events import BatchEncoder
from engine_ext.sim.output import PeerLookup, StepOutput
from engine_ext.sim.profile import SimProfile
from engine_ext.sim.request import SimRequest
from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import Namespace, WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index
from router.costs.model import CostModel
from router.costs.profile import CostProfile
from router.fleet.worker import Health, WorkerSpec, WorkerStatus
from router.plan.decider import Decider, Prompts
from router.plan.load import LoadBoard
from router.plan.planner import Planner
from router.plan.policies import PolicyName, make_policy
from router.plan.transfer_params import transfer_params
from router.replay.traces import TraceRequest, prompt_tokens

MODEL = "trace-model"
_REPLAY_KEY = HashKey(bytes(16))  # nothing of a replay leaves the process
_PEER_PORT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualFleetSetup:
    """Everything a replay depends on."""

    workers: int
    engine: SimConfig
    engine_profile: SimProfile
    cost_profile: CostProfile
    policy: PolicyName
    gpu_seconds_weight: float = 0.1
    pull_deadline_s: float = 5.0
    use_peers: bool = True
    seed: int = 0


@dataclass(slots=True)
class ReplayedRequest:
    """One request and what became of it."""

    worker: str
    arrival_s: float
    prompt_tokens: int
    predicted_cached_tokens: int
    predicted_ttft_s: float
    source: str | None
    ticket: int
    ttft_s: float | None = None
    cached_tokens: int | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)


class VirtualFleet:
    """Replays requests; ``run`` may be called once."""

    def __init__(self, setup: VirtualFleetSetup) -> None:
        self._now_s = 0.0
        self._random = Random(setup.seed)
        self._encoder = BatchEncoder()
        self.holders = HolderTable(open_index(_REPLAY_KEY, IndexLimits()), lambda: self._now_s)
        self._board = LoadBoard()
        planner = Planner(CostModel(setup.cost_profile), setup.gpu_seconds_weight, setup.pull_deadline_s)
        self._decider = Decider(
            self.holders, self._board, make_policy(setup.policy, planner), use_peers=setup.use_peers
        )
        self.engines = {f"w{i}": SimEngine(setup.engine, setup.engine_profile) for i in range(setup.workers)}
        self._statuses = [self._status(name, setup.engine) for name in self.engines]
        self._seq = dict.fromkeys(self.engines, 0)
        self._requests: dict[str, ReplayedRequest] = {}
        # (time, worker): when an engine wants to be advanced; entries may be out of date.
        self._wakes: list[tuple[float, str]] = []
        for name in self.engines:
            self.holders.register(WorkerId(name), MODEL, 1)

    def run(self, requests: Iterable[TraceRequest]) -> list[ReplayedRequest]:
        """Replay them in order of arrival until all are answered."""
        for request in sorted(requests, key=lambda one: one.arrival_s):
            self._advance_to(request.arrival_s)
            self._now_s = request.arrival_s
            self._submit(request)
        self._advance_to(float("inf"))
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
        prompts = Prompts([ids], Namespace(MODEL))
        decision = self._decider.decide(prompts, self._statuses, self._statuses, self._now_s, self._random)
        plan = decision.planned.chosen
        source = plan.source.worker if plan.source else None
        ticket = self._board.promise(
            plan.worker, plan.dp_rank, plan.terms.prefill_s, plan.terms.total_s, self._now_s, source
        )
        name = f"r{request.index}"
        self._requests[name] = ReplayedRequest(
            worker=plan.worker,
            arrival_s=self._now_s,
            prompt_tokens=len(ids),
            predicted_cached_tokens=plan.cached_tokens,
            predicted_ttft_s=plan.terms.total_s,
            source=source,
            ticket=ticket,
        )
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

    def _wake(self, worker: str) -> None:
        due_s = self.engines[worker].next_event_s()
        if due_s is not None:
            heapq.heappush(self._wakes, (due_s, worker))

    def _advance_to(self, until_s: float) -> None:
        while self._wakes and self._wakes[0][0] <= until_s:
            due_s, worker = heapq.heappop(self._wakes)
            engine = self.engines[worker]
            wanted_s = engine.next_event_s()
            if wanted_s is None or wanted_s > due_s:
                if wanted_s is not None:
                    heapq.heappush(self._wakes, (wanted_s, worker))
                continue
            self._now_s = max(self._now_s, due_s)
            self._take(worker, engine.advance(due_s))
            self._wake(worker)

    def _take(self, worker: str, output: StepOutput) -> None:
        for lookup in output.lookups:
            self._answer(worker, lookup)
        for events in output.kv_batches:
            payload = self._encoder.encode(self._now_s, events)
            self.holders.apply(WorkerRank(WorkerId(worker)), self._seq[worker], payload)
            self._seq[worker] += 1
        for token in output.tokens:
            if token.first:
                replayed = self._requests[token.request_id]
                replayed.ttft_s = self._now_s - replayed.arrival_s
                self._board.first_token(replayed.ticket, self._now_s)
        for finished in output.finished:
            replayed = self._requests[finished.request_id]
            replayed.cached_tokens = finished.usage.cached_tokens
            replayed.cached_by_tier = {
                tier.value: tokens for tier, tokens in finished.usage.cached_by_tier.items()
            }
            self._board.release(replayed.ticket, self._now_s)

    def _answer(self, worker: str, lookup: PeerLookup) -> None:
        peer = self.engines[lookup.host]
        answer = peer.serve_lookup(lookup.block_hashes, self._now_s)
        self.engines[worker].answer_lookup(lookup.request_id, answer.hits, self._now_s, wait_s=answer.wait_s)


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    """The figures of one replay."""

    requests: int
    hit_rate: float
    """Cached prompt tokens over prompt tokens."""
    ttft_p50_s: float
    ttft_p99_s: float
    largest_share: float
    """Requests of the busiest worker over the mean."""
    pulls: int
    stale: int
    """Requests whose cached tokens were fewer than predicted."""


def summarize(replayed: Sequence[ReplayedRequest], workers: int) -> ReplaySummary:
    """The figures of a replay whose requests are all answered."""
    ttfts = sorted(one.ttft_s for one in replayed if one.ttft_s is not None)
    counts: dict[str, int] = {}
    for one in replayed:
        counts[one.worker] = counts.get(one.worker, 0) + 1
    return ReplaySummary(
        requests=len(replayed),
        hit_rate=sum(one.cached_tokens or 0 for one in replayed) / sum(one.prompt_tokens for one in replayed),
        ttft_p50_s=ttfts[len(ttfts) // 2],
        ttft_p99_s=ttfts[min(len(ttfts) * 99 // 100, len(ttfts) - 1)],
        largest_share=max(counts.values()) * workers / len(replayed),
        pulls=sum(one.source is not None for one in replayed),
        stale=sum((one.cached_tokens or 0) < one.predicted_cached_tokens for one in replayed),
    )
