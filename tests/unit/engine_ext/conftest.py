# SPDX-License-Identifier: Apache-2.0
"""Drivers shared by the simulator's tests: an engine in virtual time, and two kinds of running worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from engine_ext.sim.config import SimConfig
from engine_ext.sim.core import SimEngine
from engine_ext.sim.events import KvEvent
from engine_ext.sim.network import FleetNetwork
from engine_ext.sim.noise import Noise
from engine_ext.sim.output import Finished, PeerLookup, StepOutput
from engine_ext.sim.profile import SimProfile, load_profile
from engine_ext.sim.request import SimRequest
from engine_ext.sim.tiers import StorageTier


@dataclass
class Drive:
    """One engine, driven from event to event; peers answer at once."""

    engine: SimEngine
    now_s: float = 0.0
    peers: dict[tuple[str, int], SimEngine] = field(default_factory=dict)
    batches: list[list[KvEvent]] = field(default_factory=list)
    finished: dict[str, Finished] = field(default_factory=dict)
    first_token_s: dict[str, float] = field(default_factory=dict)
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    lookups: list[PeerLookup] = field(default_factory=list)
    _count: int = 0

    def submit(self, token_ids: Sequence[int], max_tokens: int = 2, **more: object) -> str:
        self._count += 1
        name = f"r{self._count}"
        self.engine.submit(
            SimRequest(request_id=name, token_ids=token_ids, max_tokens=max_tokens, **more), self.now_s
        )
        return name

    def step(self) -> bool:
        due_s = self.engine.next_event_s()
        if due_s is None:
            return False
        assert due_s >= self.now_s
        self.now_s = due_s
        self._take(self.engine.advance(due_s))
        return True

    def run(self) -> None:
        while self.step():
            pass

    def complete(self, token_ids: Sequence[int], max_tokens: int = 2, **more: object) -> Finished:
        name = self.submit(token_ids, max_tokens, **more)
        self.run()
        return self.finished[name]

    def events(self) -> list[KvEvent]:
        """Events since the last call."""
        events = [event for batch in self.batches for event in batch]
        self.batches.clear()
        return events

    def _take(self, out: StepOutput) -> None:
        self.batches.extend(out.kv_batches)
        for token in out.tokens:
            self.token_ids.setdefault(token.request_id, []).append(token.token_id)
            if token.first:
                self.first_token_s[token.request_id] = self.now_s
        for finished in out.finished:
            self.finished[finished.request_id] = finished
        for lookup in out.lookups:
            self.lookups.append(lookup)
            peer = self.peers.get((lookup.host, lookup.port))
            if peer is None:
                self.engine.answer_lookup(lookup.request_id, None, self.now_s)
            else:
                prefill = lookup.kv_request_id if lookup.waits else None
                answer = peer.serve_lookup(
                    lookup.block_hashes, self.now_s, ticket=lookup.request_id, prefill=prefill
                )
                self.engine.answer_lookup(lookup.request_id, answer.hits, self.now_s, wait_s=answer.wait_s)


@dataclass
class Fleet:
    """Engines that pull from each other over one network; a host's name is its engine's."""

    engines: dict[str, SimEngine]
    network: FleetNetwork
    now_s: float = 0.0
    log: list[tuple[float, str, str, object]] = field(default_factory=list)
    """(time, engine, what, of whom or the events themselves)."""
    finished: dict[str, Finished] = field(default_factory=dict)
    first_token_s: dict[str, float] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    """Engines that answer nobody."""

    def submit(self, engine: str, name: str, token_ids: Sequence[int], max_tokens: int = 1, **more: object):
        request = SimRequest(request_id=name, token_ids=token_ids, max_tokens=max_tokens, **more)
        self.engines[engine].submit(request, self.now_s)

    def run(self, until_s: float = float("inf")) -> None:
        """Advance everything in order of time."""
        while (due := self._next()) is not None and due[0] <= until_s:
            due_s, name = due
            assert due_s >= self.now_s - 1e-9
            self.now_s = max(self.now_s, due_s)
            if name is None:
                self.network.advance(due_s)
            else:
                self._take(name, self.engines[name].advance(due_s))
        if until_s != float("inf"):
            self.now_s = max(self.now_s, until_s)

    def _next(self) -> tuple[float, str | None] | None:
        dues: list[tuple[float, str | None]] = []
        if self.network.next_s is not None:
            dues.append((self.network.next_s, None))
        for name, engine in self.engines.items():
            due_s = engine.next_event_s()
            if due_s is not None:
                dues.append((due_s, name))
        return min(dues, key=lambda one: (one[0], one[1] or ""), default=None)

    def _take(self, name: str, out: StepOutput) -> None:
        for lookup in out.lookups:
            if lookup.host not in self.silent:
                prefill = lookup.kv_request_id if lookup.waits else None
                ticket = name, lookup.request_id, lookup.source
                source = self.engines[lookup.host]
                answer = source.serve_lookup(lookup.block_hashes, self.now_s, ticket=ticket, prefill=prefill)
                self.engines[name].answer_lookup(
                    lookup.request_id, answer.hits, self.now_s, source=lookup.source
                )
        for reply in out.replies:
            asker, request_id, number = reply.ticket
            self.engines[asker].answer_lookup(request_id, reply.answer.hits, self.now_s, source=number)
        self.log += [(self.now_s, name, "events", events) for events in out.kv_batches]
        for token in out.tokens:
            if token.first:
                self.first_token_s[token.request_id] = self.now_s
                self.log.append((self.now_s, name, "first", token.request_id))
        for finished in out.finished:
            self.finished[finished.request_id] = finished
            self.log.append((self.now_s, name, "finished", finished))


MakeDrive = Callable[..., Drive]
MakeFleet = Callable[..., Fleet]


@pytest.fixture
def drive() -> MakeDrive:
    """Makes engines of block size 4 on the default profile; keywords go to ``SimConfig``."""

    def make(storage: StorageTier | None = None, **options: object) -> Drive:
        defaults: Mapping[str, object] = {"block_size_tokens": 4, "hbm_blocks": 65, "max_model_len": 4096}
        config = SimConfig(**{**defaults, **options})
        return Drive(SimEngine(config, load_profile("default"), storage))

    return make


@pytest.fixture
def fleet() -> MakeFleet:
    """Makes fleets of such engines with RAM; keywords beside these go to ``SimConfig``."""

    def make(
        names: str = "ab",
        *,
        profile: SimProfile | None = None,
        storage: Callable[[], StorageTier | None] = lambda: None,
        noise: Callable[[str], Noise | None] = lambda name: None,
        every_token: bool = False,
        **options: object,
    ) -> Fleet:
        defaults: Mapping[str, object] = {
            "block_size_tokens": 4,
            "hbm_blocks": 65,
            "ram_blocks": 1000,
            "max_model_len": 4096,
        }
        config = SimConfig(**{**defaults, **options})
        profile = profile or load_profile("default")
        network = FleetNetwork([*names], profile.peer_bytes_per_s)
        engines = {
            name: SimEngine(
                config,
                profile,
                storage(),
                network=network.port(name),
                noise=noise(name),
                every_token=every_token,
            )
            for name in names
        }
        return Fleet(engines, network)

    return make
