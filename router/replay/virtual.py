# SPDX-License-Identifier: Apache-2.0
"""A fleet of simulated engines in virtual time, routed by the router's own decider.

What is real: the decider, the load board, the index with its native decoder, the event bytes. What is virtual:
the clock and the network. Events reach the index at the instant they are published. Deterministic for a seed.

Each engine has storage of its own, as a local disk: the index keeps one store per worker, and it outlives a restart.

A request that its worker loses before the first token is decided again among the others, as the live gateway
retries; one that was streaming has failed. The router hears of a dead worker with its next poll.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from functools import partial
from random import Random

from engine_ext.sim.agenda import Agenda
from engine_ext.sim.core import SimEngine
from engine_ext.sim.events import BatchEncoder
from engine_ext.sim.output import Finished, StepOutput
from engine_ext.sim.request import SimRequest
from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import Namespace, WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index
from router.costs.calibration import Calibration
from router.costs.model import CostModel
from router.plan.candidate import Plan
from router.plan.decider import Decider, Prompts
from router.plan.exploration import Explorer, Exploring
from router.plan.extension_plan import ExtensionTerms
from router.plan.load import NOWHERE, LoadBoard, Resident
from router.plan.native import NativePlanner
from router.plan.observed import begin_decoding, decode_observation, observation, teaches
from router.plan.policies import Policy
from router.plan.speculation import SPECULATIVE_S
from router.plan.transfer_params import transfer_params
from router.replay.arrivals import Arrivals, TraceArrivals
from router.replay.machines import VirtualWorkers
from router.replay.oracle import JudgedPolicy, Oracle
from router.replay.policies import make_replay_policy
from router.replay.polled import PolledWorkers, next_poll_s
from router.replay.replayed import ReplayedRequest
from router.replay.setup import EngineMaker, VirtualFleetSetup
from router.replay.traces import TraceRequest, prompt_tokens
from router.replay.view import VirtualView

__all__ = ["ReplayedRequest", "VirtualFleet", "VirtualFleetSetup"]

MODEL = "trace-model"
_REPLAY_KEY = HashKey(bytes(16))  # nothing of a replay leaves the process
_RETRIES = 2
"""Default of ``gateway.retries``."""


class VirtualFleet:
    """Replays requests; ``run`` may be called once."""

    def __init__(self, setup: VirtualFleetSetup) -> None:
        self._now_s = 0.0
        self._random = Random(setup.seed)
        self._encoder = BatchEncoder(wide_tokens=True)
        self.holders = HolderTable(open_index(_REPLAY_KEY, IndexLimits()), lambda: self._now_s)
        self._board = LoadBoard()
        self.calibration = Calibration(setup.cost_profile) if setup.calibrate else None
        costs = self.calibration or CostModel(setup.cost_profile)
        planner = NativePlanner(costs, setup.gpu_seconds_weight, setup.pull_deadline_s)
        self._plans: dict[str, Plan] = {}
        self._setup = setup
        names = [f"w{i}" for i in range(setup.workers)]
        self._evicted: set[bytes] = set()
        """Blocks that no tier of some worker holds any more. Memory: one hash per block."""
        maker = EngineMaker(setup, names, self._evicted.add)
        self._workers = VirtualWorkers(names, maker, setup.engine_profile.peer_bytes_per_s)
        kv_capacity_tokens = setup.engine.hbm_blocks * setup.engine.block_size_tokens
        self._view = VirtualView(lambda: self._now_s)
        oracle = Oracle(planner, self.first_token_if)
        policy: Policy = oracle
        if setup.policy != "oracle":
            policy = make_replay_policy(setup.policy, planner, kv_capacity_tokens, self._view)
        self.explorer: Explorer | None = None
        if self.calibration is not None and setup.policy == "kv_aware" and setup.explore > 0:
            self.explorer = Explorer(self.calibration, setup.explore)
            policy = Exploring(policy, planner, self.explorer)
        judged = JudgedPolicy(policy, oracle, lambda: self._asked[0].index, setup.judge)
        self.judged = judged.judged
        policy = judged if setup.judge else policy
        # Those of others have what they look ahead with in themselves (``router.plan.peers``).
        speculative_s = SPECULATIVE_S if setup.policy in ("kv_aware", "oracle") else 0.0
        self._decider = Decider(
            self.holders, self._board, policy, use_peers=setup.use_peers, speculative_s=speculative_s
        )
        self._polled = PolledWorkers(names, setup.engine, self.holders, self._board, MODEL)
        self._seq = dict.fromkeys(names, 0)
        self._arrivals: Arrivals = TraceArrivals(())
        self._asked: tuple[TraceRequest, array[int]]
        """The request that is being decided, and its prompt."""
        self._replayed: list[ReplayedRequest] = []
        self._attempts: dict[str, tuple[TraceRequest, ReplayedRequest]] = {}
        """Those at a worker, by the engine's request id."""
        self._terms = ExtensionTerms(setup.pull_deadline_s)
        self._pulls = 0
        self._retries = _RETRIES
        self._incidents = Agenda()
        """Faults and polls: they change what is under way, and keep nothing under way."""
        for name, at_s in setup.transport_cut_at_s.items():
            self._incidents.at(at_s, partial(self._workers.cut_transport, name))
        for name, at_s in setup.killed_at_s.items():
            self._incidents.at(at_s, partial(self._kill, name))

    @property
    def engines(self) -> Mapping[str, SimEngine]:
        """The engines by worker; a restart replaces one."""
        return self._workers.engines

    def run(self, requests: Iterable[TraceRequest]) -> list[ReplayedRequest]:
        """Replay them in order of arrival until all are answered."""
        return self.replay(TraceArrivals(requests))

    def replay(self, arrivals: Arrivals) -> list[ReplayedRequest]:
        """Replay until nothing more arrives and all are answered."""
        self._arrivals = arrivals
        while (due_s := _earlier(self._workers.next_s, arrivals.next_s)) is not None:
            incident_s = self._incidents.next_s
            if incident_s is not None and incident_s <= due_s:
                self._now_s = max(self._now_s, incident_s)
                self._incidents.run(incident_s)
            elif due_s == self._workers.next_s:
                self._step()
            else:
                self._now_s = max(self._now_s, due_s)
                self._submit(arrivals.take())
        return self._replayed

    def _submit(self, request: TraceRequest) -> None:
        replayed = ReplayedRequest(
            worker="",
            arrival_s=self._now_s,
            prompt_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            predicted_cached_tokens=0,
            predicted_ttft_s=0.0,
            source=None,
            ticket=-1,
            index=request.index,
            attempts=0,
        )
        self._replayed.append(replayed)
        self._attempt(request, replayed, frozenset())

    def _attempt(self, request: TraceRequest, replayed: ReplayedRequest, tried: frozenset[str]) -> None:
        """Decide and send, until a worker takes it or nobody is left to try."""
        self._asked = request, prompt_tokens(request)
        self._view.asked(request)
        prompts = Prompts([self._asked[1]], Namespace(MODEL), slo_tpot_s=self._setup.slo_tpot_s)
        while replayed.attempts <= self._retries:
            candidates = self._polled.candidates(tried)
            if not candidates:
                break
            decision = self._decider.decide(
                prompts, candidates, self._polled.all(), self._now_s, self._random, explore=True
            )
            plan = decision.planned.chosen
            if self._dispatch(plan, replayed, decision.resident(plan)):
                return
            tried |= {plan.worker}
        self._fail(replayed)

    def _dispatch(self, plan: Plan, replayed: ReplayedRequest, resident: Resident = NOWHERE) -> bool:
        """Send the request that is being decided as planned; False when its worker turns out to be gone."""
        request, ids = self._asked
        replayed.attempts += 1
        replayed.worker = plan.worker
        replayed.source = plan.source.worker if plan.source else None
        replayed.predicted_cached_tokens = plan.cached_tokens
        replayed.predicted_ttft_s = plan.terms.total_s
        replayed.delay_s = self._now_s - replayed.arrival_s
        name = f"r{request.index}.{replayed.attempts}"
        sent = self._workers.submit(
            plan.worker,
            SimRequest(
                request_id=name,
                token_ids=ids,
                max_tokens=request.output_tokens,
                kv_transfer_params=transfer_params(plan, name, terms=self._terms),
                moved=replayed.moved,
            ),
            self._now_s,
        )
        if not sent:
            return False
        replayed.ticket = self._board.promise(
            plan.worker,
            plan.dp_rank,
            plan.terms.prefill_s,
            plan.terms.total_s,
            self._now_s,
            plan.source_workers,
            prompt_tokens=len(ids),
            missing_tokens=max(len(ids) - plan.cached_tokens, 1),
            resident=resident,
        )
        self._attempts[name] = request, replayed
        self._view.begun(plan.worker, request)
        if self.calibration is not None:
            self._plans[name] = plan
        if replayed.source is not None:
            self._pulls += 1
            if self._pulls == self._setup.kill_source_of:
                self._kill(replayed.source, self._now_s)
        return True

    def first_token_if(self, plan: Plan) -> float:
        """Seconds to the first token of the request being decided, were it sent as planned and nothing came after.

        Spends the fleet: to be called on a copy of it.
        """
        self._arrivals = TraceArrivals(())
        self._retries = 0
        request = self._asked[0]
        replayed = ReplayedRequest(
            "", self._now_s, request.input_tokens, request.output_tokens, 0, 0.0, None, -1, attempts=0
        )
        self._dispatch(plan, replayed)
        while replayed.ttft_s is None and not replayed.failed and self._workers.next_s is not None:
            self._step()
        return float("inf") if replayed.ttft_s is None else replayed.ttft_s

    def _step(self) -> None:
        """Let what is due next happen to the workers, and hear of it."""
        stepped = self._workers.step()
        if stepped is not None:
            self._now_s = max(self._now_s, stepped.at_s)
            self._take(stepped.worker, stepped.output)
            self._view.step_ended(stepped.worker, self.engines[stepped.worker].metrics())

    def _take(self, worker: str, output: StepOutput) -> None:
        cut = self._now_s >= self._setup.events_cut_at_s.get(worker, float("inf"))
        for events in output.kv_batches if not cut else ():
            payload = self._encoder.encode(self._now_s, events)
            self.holders.apply(WorkerRank(WorkerId(worker)), self._seq[worker], payload)
            self._seq[worker] += 1
        for token in output.tokens:
            if token.first:
                replayed = self._attempts[token.request_id][1]
                replayed.ttft_s = self._now_s - replayed.arrival_s
                self._board.first_token(replayed.ticket, self._now_s)
                replayed.decoding = begin_decoding(self._board, worker, 0, self._now_s)
        for finished in output.finished:
            self._finish(worker, finished)

    def _finish(self, worker: str, finished: Finished) -> None:
        request, replayed = self._attempts.pop(finished.request_id)
        self._view.ended(worker, request)
        replayed.finished_s = self._now_s
        replayed.cached_tokens = finished.usage.cached_tokens
        replayed.cached_by_tier = {
            tier.value: tokens for tier, tokens in finished.usage.cached_by_tier.items()
        }
        again = self._evicted.intersection(finished.computed_blocks)
        replayed.evicted_blocks = len(again)
        self._evicted -= again
        self._learn_decode(worker, replayed)
        self._board.release(replayed.ticket, self._now_s)
        self._learn(finished.request_id, replayed)
        self._arrivals.finished(replayed.index, self._now_s)

    def _fail(self, replayed: ReplayedRequest) -> None:
        replayed.failed = True
        self._arrivals.finished(replayed.index, self._now_s)

    # What breaks, and when the router hears of it

    def _kill(self, worker: str, now_s: float) -> None:
        if not self._workers.kill(worker, now_s):
            return
        self._incidents.at(next_poll_s(now_s), partial(self._poll, worker))
        self._incidents.at(now_s + self._setup.restart_after_s, partial(self._restart, worker))
        lost = [name for name, (_, replayed) in self._attempts.items() if replayed.worker == worker]
        for name in lost:
            request, replayed = self._attempts.pop(name)
            self._view.ended(worker, request)
            self._plans.pop(name, None)
            self._board.release(replayed.ticket, now_s)
            if replayed.ttft_s is None:
                self._attempt(request, replayed, frozenset({worker}))
            else:
                self._fail(replayed)

    def _restart(self, worker: str, now_s: float) -> None:
        self._workers.restart(worker)
        self._seq[worker] = 0
        self._incidents.at(next_poll_s(now_s), partial(self._poll, worker))
        self._polled.restarted(worker)

    def _poll(self, worker: str, _now_s: float) -> None:
        self._polled.polled(worker, answers=not self._workers.is_dead(worker))

    def _learn_decode(self, worker: str, replayed: ReplayedRequest) -> None:
        if self.calibration is not None and replayed.decoding is not None:
            begun, tokens = replayed.decoding, replayed.output_tokens
            seen = decode_observation(self._board, worker, 0, begun, tokens, self._now_s)
            self.calibration.observe_decode(seen, self._now_s)

    def _learn(self, name: str, replayed: ReplayedRequest) -> None:
        """As the live router does: when the usage of an answer is known."""
        plan = self._plans.pop(name, None)
        if self.calibration is None or plan is None or not teaches(plan):
            return
        if replayed.ttft_s is not None and replayed.cached_tokens is not None:
            ttft_s = replayed.ttft_s - replayed.delay_s
            seen = observation(plan, replayed.prompt_tokens, replayed.cached_tokens, ttft_s)
            self.calibration.observe(seen, self._now_s)


def _earlier(one_s: float | None, other_s: float | None) -> float | None:
    times_s = [time_s for time_s in (one_s, other_s) if time_s is not None]
    return min(times_s, default=None)
