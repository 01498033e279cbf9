# SPDX-License-Identifier: Apache-2.0
"""Drivers shared by the simulator's tests: an engine in virtual time, and two kinds of running worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from engine_ext.sim.config import SimConfig
from engine_ext.sim.core import SimEngine
from engine_ext.sim.events import KvEvent
from engine_ext.sim.output import Finished, PeerLookup, StepOutput
from engine_ext.sim.profile import load_profile
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


MakeDrive = Callable[..., Drive]


@pytest.fixture
def drive() -> MakeDrive:
    """Makes engines of block size 4 on the default profile; keywords go to ``SimConfig``."""

    def make(storage: StorageTier | None = None, **options: object) -> Drive:
        defaults: Mapping[str, object] = {"block_size_tokens": 4, "hbm_blocks": 65, "max_model_len": 4096}
        config = SimConfig(**{**defaults, **options})
        return Drive(SimEngine(config, load_profile("default"), storage))

    return make
