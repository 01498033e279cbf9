# SPDX-License-Identifier: Apache-2.0
"""The indexer as the router runs it: a subscriber's thread, holders, and an index of either backend."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from eventually import eventually_now
from kv_batches import KEY_BYTES, prompt
from kv_publisher import ScriptedEngine

from indexer.hashing import HashKey
from indexer.holders import HolderTable, RankState
from indexer.identity import WorkerId, WorkerRank
from indexer.index import Backend, IndexLimits, open_index
from indexer.stream import EventStream, StreamState
from indexer.subscriber import EventSubscriber, RankEndpoints

MODEL = "m"


@dataclass
class Indexer:
    """A table, the subscriber that writes it, and questions to both."""

    holders: HolderTable
    subscriber: EventSubscriber

    def follow(self, worker: str, *engines: ScriptedEngine, replay: bool = True) -> None:
        """Register a worker with one engine per rank and wait for its subscriptions."""
        self.holders.register(WorkerId(worker), MODEL, len(engines))
        self.subscriber.add(
            [
                RankEndpoints(
                    WorkerRank(WorkerId(worker), rank), engine.events, engine.replay if replay else None
                )
                for rank, engine in enumerate(engines)
            ]
        )
        for engine in engines:
            engine.wait_for_subscriber()
        for rank in range(len(engines)):
            self.wait_live(worker, rank)

    def wait_live(self, worker: str, rank: int = 0) -> None:
        """Wait until a stream is connected and has its history."""

        def live() -> bool:
            stream = self.streams().get(WorkerRank(WorkerId(worker), rank))
            connected = self.state(worker, rank).connected
            return stream is not None and stream.state is StreamState.LIVE and connected

        eventually_now(live, f"the stream of {worker}")

    def streams(self) -> dict[WorkerRank, EventStream]:
        return self.subscriber.streams()

    def stream(self, worker: str, rank: int = 0) -> EventStream:
        return self.streams()[WorkerRank(WorkerId(worker), rank)]

    def state(self, worker: str, rank: int = 0) -> RankState:
        return self.holders.workers()[WorkerId(worker)].ranks[rank]

    def incarnation(self, worker: str) -> int:
        return self.holders.workers()[WorkerId(worker)].incarnation

    def wait_seq(self, worker: str, seq: int, rank: int = 0) -> None:
        eventually_now(lambda: self.state(worker, rank).seq == seq, f"batch {seq} of {worker}")

    def matched(self, names: list[int]) -> dict[tuple[str, int], int]:
        """Per (worker, rank): leading blocks of this prompt that it holds on any tier."""
        hashes = self.holders.index.hash_blocks(prompt(names), 4, MODEL, "", [])
        found: dict[tuple[str, int], int] = {}
        for owner, run in self.holders.runs(hashes):
            if run.start == 0:
                place = (owner.worker, owner.dp_rank)
                found[place] = max(found.get(place, 0), run.end)
        return found


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@pytest.fixture
def indexer(backend: Backend) -> Iterator[Indexer]:
    index = open_index(HashKey(KEY_BYTES), IndexLimits(), backend)
    holders = HolderTable(index, time.monotonic)
    subscriber = EventSubscriber(holders, time.monotonic, replay_timeout_s=1.0)
    subscriber.start()
    yield Indexer(holders, subscriber)
    subscriber.stop()
    assert index.check() == ""
