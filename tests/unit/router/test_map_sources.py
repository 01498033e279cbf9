# SPDX-License-Identifier: Apache-2.0
"""Where maps come from: events, or our own decisions, and when that changes."""

from __future__ import annotations

from array import array

import kv_batches as kv
import pytest

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import Namespace, WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index
from router.config_sections import IndexConfig
from router.fleet.worker import WorkerSpec, WorkerStatus
from router.map_sources import MapSources, Switch
from router.plan.decider import Prompts

WORKER = WorkerId("w")
PROMPT = Prompts([kv.prompt([1, 2, 3])], Namespace("m"))


class World:
    """One worker of two ranks; the test says what its streams do."""

    def __init__(self, *, events: bool = True, approximate: bool = True) -> None:
        self.now_s = 100.0
        self.holders = HolderTable(open_index(HashKey(kv.KEY_BYTES), IndexLimits()), lambda: self.now_s)
        self.holders.register(WORKER, "m", 2)
        self.silent = False
        self.switches: list[Switch] = []
        self.maps = MapSources(
            self.holders,
            IndexConfig(approximate=approximate, approximate_ttl_s=60.0),
            lambda _: self.silent,
            lambda: self.now_s,
            self.switches.append,
        )
        spec = WorkerSpec(WORKER, "http://w", events="tcp://w:1" if events else None, ranks=2)
        self.status = WorkerStatus(spec, block_size_tokens=kv.BLOCK, hbm_blocks=8)

    def connect(self, connected: bool = True) -> None:
        for rank in range(2):
            self.holders.connection(WorkerRank(WORKER, rank), connected)

    def poll(self, after_s: float = 1.0) -> None:
        self.now_s += after_s
        self.maps.polled(self.status)

    def send(self, dp_rank: int = 0, prompts: Prompts = PROMPT) -> None:
        self.maps.sent(self.status, dp_rank, prompts)

    def held(self, dp_rank: int = 0) -> int:
        hashes = self.holders.index.hash_blocks(kv.prompt([1, 2, 3]), kv.BLOCK, "m", "", [])
        ends = [run.end for owner, run in self.holders.runs(hashes) if owner.dp_rank == dp_rank]
        return max(ends, default=0)

    def event(self, *events: object, dp_rank: int = 0, seq: int = 0) -> None:
        self.holders.apply(WorkerRank(WORKER, dp_rank), seq, kv.batch(*events))


def test_while_events_come_our_own_decisions_are_not_counted() -> None:
    world = World()
    world.connect()
    world.poll()
    world.send()
    assert (world.held(), world.maps.of(WORKER, 0), world.switches) == (0, "events", [])


def test_a_worker_without_events_holds_what_was_sent_to_it_by_rank() -> None:
    world = World(events=False)
    world.poll()
    world.send(dp_rank=1)
    assert (world.held(0), world.held(1)) == (0, 3)
    assert world.maps.of(WORKER, 1) == "approximate"
    assert world.maps.approximate() == {WORKER: "no_events"}


def test_a_silent_worker_is_guessed_until_its_first_event() -> None:
    world = World()
    world.connect()
    world.poll()
    world.silent = True
    world.poll()
    world.send()
    assert (world.held(), world.maps.of(WORKER, 0)) == (3, "approximate")
    world.silent = False
    world.event(kv.stored([1]))
    world.poll()
    assert (world.held(), world.maps.of(WORKER, 0)) == (1, "events")
    assert [(one.source, one.why) for one in world.switches] == [
        ("approximate", "silent"),
        ("approximate", "silent"),
        ("events", ""),
        ("events", ""),
    ]


def test_a_stream_broken_for_long_keeps_its_map_and_what_is_sent_is_added() -> None:
    world = World()
    world.connect()
    world.poll()
    world.event(kv.stored([1]))
    world.connect(connected=False)
    world.poll()
    world.send()
    assert (world.held(), world.maps.of(WORKER, 0)) == (1, "events")  # a reconnect may be under way
    world.poll(after_s=20.0)
    world.send()
    assert (world.held(), world.maps.approximate()) == (3, {WORKER: "disconnected"})
    world.connect()
    world.poll()
    assert (world.held(), world.maps.of(WORKER, 0)) == (1, "events")


def test_a_stream_that_flaps_is_not_called_broken() -> None:
    world = World()
    for _ in range(20):
        world.connect(connected=False)
        world.poll(after_s=5.0)
        world.connect()
        world.poll(after_s=1.0)
    assert world.switches == []


def test_a_guess_expires_and_is_bounded_by_the_blocks_that_the_rank_has() -> None:
    world = World(events=False)
    world.poll()
    world.send()
    world.send(prompts=Prompts([kv.prompt(range(20, 40))], Namespace("m")))
    assert world.held() == 0  # eight blocks, all of the second prompt
    world.send()
    world.poll(after_s=61.0)
    assert world.held() == 0


@pytest.mark.parametrize("how", ["restarted", "asleep", "cleared"])
def test_a_guess_ends_with_the_cache_it_is_about(how: str) -> None:
    world = World(events=False)
    world.poll()
    world.send()
    if how == "restarted":
        world.maps.restarted(WORKER)
    elif how == "asleep":
        world.holders.clear_device(WORKER)
        world.status.asleep = True
        world.poll()
        world.status.asleep = False
    else:
        world.holders.clear(WORKER)
    assert world.held() == 0
    world.send()
    assert world.held() == 3
    assert world.holders.index.check() == ""


def test_guesses_can_be_turned_off() -> None:
    world = World(events=False, approximate=False)
    world.poll()
    world.send()
    assert world.held() == 0


def test_a_worker_that_left_leaves_no_guess() -> None:
    world = World(events=False)
    world.poll()
    world.send()
    world.maps.forget(WORKER)
    world.holders.unregister(WORKER)
    assert list(world.maps.rows()) == []
    assert world.maps.of(WORKER, 0) is None
    world.maps.sent(world.status, 0, Prompts([array("I", [1] * 8)], Namespace("m")))
    world.holders.tick()
    assert world.holders.index.distinct_blocks == 0
