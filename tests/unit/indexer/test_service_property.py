# SPDX-License-Identifier: Apache-2.0
"""Whatever batches came, ``/query`` answers what the reference index holds, walked block by block."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import kv_batches as kv
import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import Tier, WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index
from indexer.service.app import IndexerApp
from indexer.service.http import Answer, Request
from indexer.subscriber import RankEndpoints

KEY = HashKey(kv.KEY_BYTES)
CHAINS = ((1, 2, 3, 4, 5), (1, 2, 6, 7), (8, 9))
INSTANCES = (1, 2)
RANKS = 3  # of which the last is never registered
MEDIA = {Tier.HBM: "GPU", Tier.RAM: "CPU", Tier.STORAGE: "STORAGE"}

Step = tuple[int, int, bytes]
"""(instance, rank named by the batch, payload)."""


@st.composite
def _steps(draw: st.DrawFn) -> list[Step]:
    steps = []
    for _ in range(draw(st.integers(1, 14))):
        chain = draw(st.sampled_from(CHAINS))
        end = draw(st.integers(1, len(chain)))
        tier = draw(st.sampled_from(Tier))
        start = draw(st.integers(0, end - 1))
        event = draw(
            st.sampled_from(
                [
                    kv.stored(chain[:end]),
                    kv.stored(chain[:end]),
                    kv.placeholder(chain[start:end], MEDIA[Tier.RAM if tier is Tier.HBM else tier]),
                    kv.removed(chain[start:end], MEDIA[tier]),
                    kv.cleared(),
                ]
            )
        )
        # Mostly one and the same rank: what many ranks hold a little of says less.
        rank = draw(st.sampled_from((0, 0, 0, *range(RANKS))))
        steps.append((draw(st.sampled_from((1, 1, *INSTANCES))), rank, kv.batch(event, rank=rank)))
    return steps


@dataclass
class NoSubscriptions:
    """Registrations without sockets."""

    workers: dict[tuple[int, int], WorkerId] = field(default_factory=dict)

    def add(self, endpoints: Sequence[RankEndpoints]) -> None:
        for one in endpoints:
            self.workers[int(one.rank.worker.split("/")[0]), one.rank.dp_rank] = one.rank.worker

    def remove(self, worker: WorkerId) -> None:
        """Nothing was opened."""


def ask(app: IndexerApp, path: str, **body: Any) -> Any:
    answer = app.answer(
        Request("POST", path, msgspec.json.encode({"model_name": "m", **body}), keep_alive=True)
    )
    assert isinstance(answer, Answer)
    assert answer.status in (200, 201), answer
    return msgspec.json.decode(answer.body)


def reached(hashes: Sequence[int], held: dict[int, int], store: dict[int, int]) -> tuple[int, int, int]:
    """Tokens in HBM from the start, on with RAM, on with storage; block by block."""

    def go_on(position: int, holds: Any) -> int:
        while position < len(hashes) and holds(hashes[position]):
            position += 1
        return position

    hbm = go_on(0, lambda value: held.get(value, 0) & 1)
    ram = go_on(hbm, lambda value: held.get(value, 0) & 0b1010 == 0b0010)
    storage = go_on(ram, lambda value: store.get(value, 0) & 0b100)
    return hbm * kv.BLOCK, ram * kv.BLOCK, storage * kv.BLOCK


def expected(table: HolderTable, chain: Sequence[int]) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Reach of every rank of the reference's table that reaches anything."""
    raw = table.index.hash_blocks(kv.prompt(chain), kv.BLOCK, "m", "", [])
    hashes = struct.unpack(f"<{len(raw) // 8}Q", raw)
    found = {}
    for worker, holders in table.workers().items():
        store = dict(table.index.blocks(holders.store_slot))
        for rank, state in enumerate(holders.ranks):
            reach = reached(hashes, dict(table.index.blocks(state.slot)), store)
            # A store is its stream's: a rank that holds nothing itself is told apart only where it is registered.
            if reach[2] and (reach[1] or rank == int(worker.split("/")[1].split("#")[0])):
                found[worker.split("/")[0], str(rank)] = reach
    return found


DOUBTFUL_RAM = [(1, 0, kv.batch(kv.stored(CHAINS[2]), kv.placeholder(CHAINS[2]), kv.cleared(), rank=0))]
TIER_AFTER_TIER = [
    (
        1,
        0,
        kv.batch(
            kv.stored(CHAINS[0]),
            kv.placeholder([2, 3]),
            kv.placeholder([4, 5], "STORAGE"),
            kv.removed([2, 3, 4, 5]),
            rank=0,
        ),
    )
]


@settings(max_examples=100, deadline=None)
@example(DOUBTFUL_RAM)
@example(TIER_AFTER_TIER)
@given(_steps())
def test_query_equals_the_reference_index(steps: list[Step]) -> None:
    app, subscriptions = IndexerApp(KEY), NoSubscriptions()
    app.registry._subscriptions = subscriptions
    reference = HolderTable(open_index(KEY, IndexLimits(), "reference"), lambda: 0.0)
    for instance in INSTANCES:
        ask(app, "/register", instance_id=instance, endpoint="tcp://127.0.0.1:1", block_size=kv.BLOCK)
        reference.register(WorkerId(f"{instance}/0"), "m", RANKS)
    for seq, (instance, _, payload) in enumerate(steps):
        app.holders.apply(WorkerRank(subscriptions.workers[instance, 0], 0), seq, payload)
        reference.apply(WorkerRank(WorkerId(f"{instance}/0"), 0), seq, payload)
        for chain in CHAINS:
            found = ask(app, "/query", token_ids=list(kv.prompt(chain)))
            check(found, expected(reference, chain))
    assert app.holders.index.check() == ""


def check(found: Any, truth: dict[tuple[str, str], tuple[int, int, int]]) -> None:
    scores: dict[str, dict[str, int]] = {}
    reach: dict[str, tuple[int, ...]] = {}
    for (instance, rank), tokens in truth.items():
        if tokens[0]:
            scores.setdefault(instance, {})[rank] = tokens[0]
        reach[instance] = tuple(map(max, reach.get(instance, (0, 0, 0)), tokens))
    assert found["scores"] == scores
    assert {
        name: (entry["gpu"], entry["cpu"], entry["disk"]) for name, entry in found["instances"].items()
    } == reach
    for name, entry in found["instances"].items():
        assert entry["longest_matched"] == entry["disk"]
        assert entry["dp"] == scores.get(name, {})
