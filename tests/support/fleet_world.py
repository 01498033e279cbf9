# SPDX-License-Identifier: Apache-2.0
"""A fleet to which all happens that can, known to a native and to a plain decider alike: rules without questions."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from random import Random

import kv_batches as kv
import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index
from router.costs.calibration import Calibration
from router.costs.observation import Observation
from router.costs.profile import load_profile
from router.decisions.trust import Trust
from router.fleet.snapshot import Snapshot
from router.fleet.worker import Health, WorkerSpec, WorkerStatus
from router.plan import native_fleet
from router.plan.decider import Decider
from router.plan.load import Board, LoadBoard
from router.plan.native import NativePlanner
from router.plan.native_board import NativeLoadBoard
from router.plan.native_fleet import NativeFleet
from router.plan.planner import Planner
from router.plan.policies import make_policy

MODEL = "m"
NAMES = [f"w{number}" for number in range(5)]
# Prompts are short, so computing is slow here: every path is the best one now and then.
PROFILE = msgspec.structs.replace(
    load_profile("default"),
    prefill_start_s=0.002,
    prefill_s_per_token=1e-4,
    prefill_s_per_token_squared=1e-7,
    kv_bytes_per_token=1.0,
    step_tokens=128.0,
    ram_start_s=0.001,
    ram_bytes_per_s=1e5,
    peer_connect_s=0.005,
    peer_lookup_s=0.002,
    peer_bytes_per_s=5e4,
    peer_share_exponent=0.9,
    storage_start_s=0.004,
    storage_bytes_per_s=2e4,
)
WEIGHT, DEADLINE_S = 0.1, 0.02
MOST_BLOCKS = 24
SHARED = 10
names = st.sampled_from(NAMES)
branches = st.sampled_from("xy")
lengths = st.integers(1, MOST_BLOCKS)


def prompt_ids(branch: str, tokens: int) -> array[int]:
    """Two prompts that share their first tokens."""
    shared = [(i * 37) % 5000 for i in range(SHARED * 16)]
    rest = [(i * 53 + ord(branch)) % 5000 for i in range(MOST_BLOCKS * 16)]
    return array("I", [*shared, *rest][:tokens])


def block_names(branch: str, blocks: int) -> list[int]:
    return [i if i < SHARED else i + 1000 * ord(branch) for i in range(blocks)]


def status_of(name: str) -> WorkerStatus:
    extension = f"{name}:5720" if name != NAMES[-1] else None
    spec = WorkerSpec(name, f"http://{name}", p2p=f"{name}:5710", extension=extension)
    return WorkerStatus(
        spec, health=Health.HEALTHY, answering=True, block_size_tokens=16, hbm_blocks=4 * MOST_BLOCKS
    )


class FleetWorld(RuleBasedStateMachine):
    allow_unfingerprinted_peers = False
    kept = native_fleet.KEPT
    """Plans that the native decider keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(native_fleet, "KEPT", self.kept)
        self.now_s = 0.0
        self.random = Random(0)
        self.holders = HolderTable(open_index(HashKey(kv.KEY_BYTES), IndexLimits()), lambda: self.now_s)
        self.boards = NativeLoadBoard(), LoadBoard()
        self.calibration, self.trust = Calibration(PROFILE), Trust()
        self.statuses: dict[str, WorkerStatus] = {}
        self.snapshot = Snapshot()
        self.tickets: list[tuple[int, int]] = []
        self.decoding: list[tuple[int, int]] = []
        self.seq = 0
        planner = NativePlanner(self.calibration, WEIGHT, DEADLINE_S)
        table = NativeFleet(
            self.holders,
            self.boards[0],
            self.calibration,
            planner.settings,
            use_peers=True,
            trust=self.trust,
            allow_unfingerprinted_peers=self.allow_unfingerprinted_peers,
        )
        self.native = Decider(
            self.holders,
            self.boards[0],
            make_policy("kv_aware", planner),
            use_peers=True,
            trust=self.trust.of,
            fleet=table,
            allow_unfingerprinted_peers=self.allow_unfingerprinted_peers,
        )
        self.plain = Decider(
            self.holders,
            self.boards[1],
            make_policy("kv_aware", Planner(self.calibration, WEIGHT, DEADLINE_S)),
            use_peers=True,
            trust=self.trust.of,
            allow_unfingerprinted_peers=self.allow_unfingerprinted_peers,
        )

    @initialize()
    def some_are_there(self) -> None:
        for number, name in enumerate(NAMES[:4]):
            self.join(name)
            self.register(name)
            self.store(name, 0, "xy"[number % 2], 8 * number, 16, {"CPU"}, first=number)
            self.store(name, 0, "yx"[number % 2], 20, 16, {"STORAGE"}, first=0, evicted=2 * number)

    # The fleet

    @rule(name=names)
    def join(self, name: str) -> None:
        self.statuses.setdefault(name, status_of(name))
        self.changed()

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.statuses.pop(name, None)
        for board in self.boards:
            board.forget(name)
        self.calibration.forget(name)
        self.trust.forget(name)
        self.holders.unregister(WorkerId(name))
        self.changed()

    @rule(name=names)
    def hide(self, name: str) -> None:
        """Out of the lists for a while, but not forgotten."""
        self.statuses.pop(name, None)
        self.changed()

    @rule(name=names, size=st.sampled_from([None, 16, 8]))
    def resize(self, name: str, size: int | None) -> None:
        if name in self.statuses:
            self.statuses[name].block_size_tokens = size
            self.changed()

    @rule(
        name=names,
        ranks=st.integers(1, 3),
        chunk=st.sampled_from([1, 1, 4]),
        peer=st.booleans(),
        extension=st.booleans(),
        size=st.sampled_from([None, 16, 16, 8]),
        health=st.sampled_from([Health.HEALTHY, Health.DRAINING, Health.BACKOFF]),
        answering=st.booleans(),
        dtype=st.sampled_from([None, "fp8"]),
        hbm_blocks=st.sampled_from([None, 30, 60]),
    )
    def change(
        self,
        name: str,
        ranks: int,
        chunk: int,
        peer: bool,
        extension: bool,
        size: int | None,
        health: Health,
        answering: bool,
        dtype: str | None,
        hbm_blocks: int | None,
    ) -> None:
        status = self.statuses.get(name)
        if status is not None:
            p2p = f"{name}:5710" if peer else None
            ours = f"{name}:5720" if extension else None
            status.spec = replace(status.spec, ranks=ranks, chunk_blocks=chunk, p2p=p2p, extension=ours)
            status.block_size_tokens, status.health, status.answering = size, health, answering
            status.cache_dtype, status.hbm_blocks = dtype, hbm_blocks
            self.changed()

    def changed(self) -> None:
        self.snapshot = Snapshot(self.statuses.values())

    # Who holds what

    @rule(name=names, ranks=st.integers(1, 3))
    def register(self, name: str, ranks: int = 1) -> None:
        self.holders.register(WorkerId(name), MODEL, ranks)

    @rule(
        name=names,
        rank=st.sampled_from([0, 0, 0, 1, 2]),
        branch=branches,
        blocks=lengths,
        size=st.sampled_from([16, 16, 8]),
        media=st.sampled_from([{"CPU"}, {"STORAGE"}, {"CPU", "STORAGE"}]),
        first=st.integers(0, 12),
        evicted=st.sampled_from([None, 0, 2, 5]),
    )
    def store(
        self,
        name: str,
        rank: int,
        branch: str,
        blocks: int,
        size: int,
        media: set[str],
        first: int,
        evicted: int | None = None,
    ) -> None:
        """Blocks in HBM; those from ``first`` on in ``media`` too; those from ``evicted`` on no more in HBM."""
        held = block_names(branch, blocks)
        ids = prompt_ids(branch, blocks * size)
        below = [kv.placeholder(held[first:], medium) for medium in sorted(media)]
        gone = [] if evicted is None else [kv.removed(held[evicted:])]
        self.publish(name, rank, kv.stored(held, ids, block_size=size), *below, *gone)

    @rule(
        name=names,
        rank=st.integers(0, 2),
        branch=branches,
        start=st.integers(0, MOST_BLOCKS),
        blocks=st.integers(1, 6),
        medium=st.sampled_from(["GPU", "GPU", "CPU", "STORAGE"]),
    )
    def remove(self, name: str, rank: int, branch: str, start: int, blocks: int, medium: str) -> None:
        gone = block_names(branch, MOST_BLOCKS)[start : start + blocks]
        self.publish(name, rank, kv.removed(gone, medium))

    @rule(name=names, rank=st.integers(0, 2))
    def clear_cache(self, name: str, rank: int) -> None:
        self.publish(name, rank, kv.cleared())

    def publish(self, name: str, rank: int, *events: object) -> None:
        self.holders.apply(WorkerRank(WorkerId(name), rank), self.seq, kv.batch(*events))
        self.seq += 1

    @rule(name=names, rank=st.integers(0, 2), reason=st.sampled_from([None, "reconnected"]))
    def suspect(self, name: str, rank: int, reason: str | None) -> None:
        self.holders.suspect(WorkerRank(WorkerId(name), rank), reason)

    @rule(name=names)
    def restart(self, name: str) -> None:
        self.holders.new_incarnation(WorkerId(name), "test")
        for board in self.boards:
            board.forget(name)

    @rule(name=names)
    def purge(self, name: str) -> None:
        self.holders.clear(WorkerId(name))

    # Load, constants, trust

    @rule(name=names, running=st.integers(0, 5), waiting=st.integers(0, 5))
    def poll(self, name: str, running: int, waiting: int) -> None:
        for board in self.boards:
            board.sampled(name, running, waiting, self.now_s)

    @rule(passed_s=st.floats(0, 3))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule(over=st.booleans())
    def answer(self, over: bool) -> None:
        if self.tickets:
            tickets = self.tickets.pop(self.random.randrange(len(self.tickets)))
            boards: tuple[Board, Board] = self.boards
            for board, ticket in zip(boards, tickets, strict=True):
                board.first_token(ticket, self.now_s)
                if over:
                    board.release(ticket, self.now_s)
            if not over:
                self.decoding.append(tickets)

    @rule(
        name=names,
        source=names,
        factor=st.sampled_from([0.1, 0.8, 1.3, 10.0]),
        peer_tokens=st.sampled_from([0, 200, 2000]),
        lost=st.booleans(),
        times=st.integers(1, 4),
    )
    def learn(self, name: str, source: str, factor: float, peer_tokens: int, lost: bool, times: int) -> None:
        pulled = peer_tokens if source != name else 0
        seen = Observation(
            worker=name,
            source=source if pulled else None,
            prompt_tokens=4000,
            ram_tokens=500,
            peer_tokens=pulled,
            storage_tokens=0,
            planned_cached_tokens=500 + pulled,
            cached_tokens=0 if lost and pulled else 500 + pulled,
            decodes=1,
            other_pulls=0,
            connected=False,
            queue_s=0.0,
            ttft_s=0.2 * factor,
        )
        for _ in range(times):
            self.calibration.observe(seen, self.now_s)

    @rule(name=names, promised=st.integers(1, 50_000), kept=st.floats(0, 1))
    def disappoint(self, name: str, promised: int, kept: float) -> None:
        self.trust.observe(name, promised, math.floor(promised * kept), self.now_s)

    # Decisions
