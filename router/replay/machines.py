# SPDX-License-Identifier: Apache-2.0
"""The workers of a virtual fleet: engines, the network between them, and what breaks. No router in here.

Time is the caller's: ``next_s`` says when something is due, ``step`` does it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_ext.sim.core import SimEngine
from engine_ext.sim.network import FleetNetwork, PeerNetwork
from engine_ext.sim.output import PeerLookup, PeerReply, StepOutput
from engine_ext.sim.request import SimRequest

MakeEngine = Callable[[str, int, PeerNetwork], SimEngine]
"""(worker, how many times it has been started before, its place in the network)."""

_NEVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one engine put out, and when."""

    at_s: float
    worker: str
    output: StepOutput


class VirtualWorkers:
    """Advances the engines in order of time. A worker's name is its host name."""

    def __init__(self, names: Sequence[str], make_engine: MakeEngine, peer_bytes_per_s: float) -> None:
        self._make_engine = make_engine
        self._network = FleetNetwork(names, peer_bytes_per_s)
        self._starts = dict.fromkeys(names, 0)
        self.engines = {name: make_engine(name, 0, self._network.port(name)) for name in names}
        self._dead: set[str] = set()
        self._cut_off: set[str] = set()
        self._stalled: set[tuple[str, str]] = set()
        """(worker, dead peer): it has found the peer dead once, and tries to connect again from then on."""
        # (time, worker): when an engine wants to be advanced; entries that are not in _wake_at_s are out of date.
        self._wakes: list[tuple[float, str]] = []
        self._wake_at_s: dict[str, float] = {}

    @property
    def next_s(self) -> float | None:
        """When something is due; None when all are idle."""
        pulled_s = self._network.next_s
        wake_s = self._wakes[0][0] if self._wakes else None
        if pulled_s is None or wake_s is None:
            return wake_s if pulled_s is None else pulled_s
        return min(pulled_s, wake_s)

    def step(self) -> Stepped | None:
        """Do what is due next; None where nothing came out."""
        pulled_s = self._network.next_s
        if pulled_s is not None and (not self._wakes or pulled_s <= self._wakes[0][0]):
            self._wake_all(self._network.advance(pulled_s))
            return None
        due_s, worker = heapq.heappop(self._wakes)
        if self._wake_at_s.get(worker) != due_s:
            return None  # it was due earlier after all, and has been advanced
        del self._wake_at_s[worker]
        engine = self.engines[worker]
        wanted_s = engine.next_event_s()
        if wanted_s is None or wanted_s > due_s:
            self._wake(worker)
            return None
        output = engine.advance(due_s)
        for lookup in output.lookups:
            self._look_up(worker, lookup, due_s)
        for reply in output.replies:
            self._pass_on(worker, reply, due_s)
        self._wake(worker)
        return Stepped(due_s, worker, output)

    def submit(self, worker: str, request: SimRequest, now_s: float) -> bool:
        """Give a worker a request; False where nobody listens."""
        if worker in self._dead:
            return False
        self.engines[worker].submit(request, now_s)
        self._wake(worker)
        return True

    # What breaks

    def cut_transport(self, worker: str, now_s: float) -> None:
        """From now on no peer hears from it, nor it from any; pulls under way fail."""
        self._cut_off.add(worker)
        self._wake_all(self._network.cut(worker, now_s))

    def kill(self, worker: str, now_s: float) -> bool:
        """Its process is gone, with everything in its memory; False if it was already."""
        if worker in self._dead:
            return False
        self._dead.add(worker)
        self._wake_at_s.pop(worker, None)
        self._wake_all(self._network.cut(worker, now_s))
        return True

    def restart(self, worker: str) -> None:
        """A new process at the same address."""
        self._dead.discard(worker)
        self._stalled = {pair for pair in self._stalled if pair[1] != worker}
        self._starts[worker] += 1
        self.engines[worker] = self._make_engine(worker, self._starts[worker], self._network.port(worker))

    def is_dead(self, worker: str) -> bool:
        """Whether its process is gone."""
        return worker in self._dead

    # Between engines

    def _look_up(self, worker: str, lookup: PeerLookup, now_s: float) -> None:
        peer = lookup.host
        if {worker, peer} & self._cut_off:
            return  # no answer: the engine gives up in time
        if peer in self._dead:
            self._find_dead(worker, peer, lookup, now_s)
            return
        prefill = lookup.kv_request_id if lookup.waits else None
        ticket = worker, lookup.request_id, lookup.source
        answer = self.engines[peer].serve_lookup(lookup.block_hashes, now_s, ticket=ticket, prefill=prefill)
        self._wake(peer)
        self.engines[worker].answer_lookup(
            lookup.request_id, answer.hits, now_s, wait_s=answer.wait_s, source=lookup.source
        )

    def _find_dead(self, worker: str, peer: str, lookup: PeerLookup, now_s: float) -> None:
        """The first question to a killed peer fails at once, later ones wait for a handshake (vLLM 0.32, measured)."""
        if (worker, peer) not in self._stalled:
            self._stalled.add((worker, peer))
            nothing = [False] * len(lookup.block_hashes)
            self.engines[worker].answer_lookup(lookup.request_id, nothing, now_s, source=lookup.source)

    def _pass_on(self, peer: str, reply: PeerReply, now_s: float) -> None:
        assert isinstance(reply.ticket, tuple)  # noqa: S101 - tickets are those of _look_up
        worker, request_id, source = reply.ticket
        if not {worker, peer} & self._cut_off and worker not in self._dead:
            answer = reply.answer
            self.engines[worker].answer_lookup(
                request_id, answer.hits, now_s, wait_s=answer.wait_s, source=source
            )
            self._wake(worker)

    def _wake_all(self, workers: set[str]) -> None:
        for worker in sorted(workers):
            self._wake(worker)

    def _wake(self, worker: str) -> None:
        """Advance an engine when it next has something to do."""
        if worker in self._dead:
            return
        due_s = self.engines[worker].next_event_s()
        if due_s is not None and due_s < self._wake_at_s.get(worker, _NEVER_S):
            self._wake_at_s[worker] = due_s
            heapq.heappush(self._wakes, (due_s, worker))
