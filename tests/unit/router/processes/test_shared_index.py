# SPDX-License-Identifier: Apache-2.0
"""Decisions over an index that another process writes: those of the writer itself."""

from __future__ import annotations

from array import array
from pathlib import Path
from random import Random

import pytest
from kv_batches import batch, stored

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import Namespace, WorkerId, WorkerRank
from indexer.index import IndexLimits
from router.costs.model import CostModel
from router.costs.profile import load_profile
from router.errors import ConfigError
from router.fleet.snapshot import Snapshot
from router.fleet.worker import Health, WorkerSpec, WorkerStatus
from router.plan.decider import Decider, Prompts
from router.plan.holders import Holders
from router.plan.native import NativePlanner
from router.plan.native_board import NativeLoadBoard
from router.plan.native_fleet import NativeFleet
from router.plan.policies import make_policy
from router.processes.followed_holders import FollowedHolders
from router.processes.shared_index import ReadsIndex, publish_index, remove_older, write_shared_index
from router.processes.told import HoldersTold, IndexTold, RankTold

KEY = HashKey(bytes(16))
SIZE = 4
IDS = array("I", range(8 * SIZE + 1))
COSTS = CostModel(load_profile("default"))


class Writer:
    """The keeper's side."""

    def __init__(self, home: Path, generation: int) -> None:
        index, self.told = write_shared_index(KEY, IndexLimits(), home, generation)
        self.holders = HolderTable(index, lambda: 5.0)
        publish_index(index)

    def hold(self, worker: str, blocks: int) -> None:
        self.holders.register(WorkerId(worker), "m", 1)
        if blocks:
            event = stored(list(range(1, blocks + 1)), tokens=IDS[: blocks * SIZE].tolist(), block_size=SIZE)
            self.holders.apply(WorkerRank(WorkerId(worker)), 0, batch(event))

    def tell(self, to: FollowedHolders) -> None:
        for name, one in self.holders.workers().items():
            ranks = [RankTold(r.slot, r.seq, r.applied_at_s, r.partial, r.suspect) for r in one.ranks]
            told = HoldersTold(
                self.told.generation, one.model, one.plain, one.store_slot, 0.0, 1, "first seen", ranks
            )
            to.put(name, told)


def decide(holders: Holders) -> tuple[str, dict[str, int], float | None, bool]:
    board = NativeLoadBoard()
    planner = NativePlanner(COSTS, 0.1, 5.0)
    table = NativeFleet(holders, board, COSTS, planner.settings, use_peers=True)
    decider = Decider(holders, board, make_policy("kv_aware", planner), use_peers=True, fleet=table)
    statuses = Snapshot(
        [
            WorkerStatus(
                WorkerSpec(n, f"http://{n}"), health=Health.HEALTHY, answering=True, block_size_tokens=SIZE
            )
            for n in ("a", "b")
        ]
    )
    decision = decider.decide(Prompts([IDS], Namespace("m")), statuses, statuses, 6.0, Random(1))
    plan = decision.planned.chosen
    return plan.worker, dict(plan.path_blocks), decision.index_age_s, decision.indexed


def test_a_reader_decides_as_the_writer_does(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1)
    followed = FollowedHolders(ReadsIndex(KEY), writer.told)
    writer.hold("a", 0)
    writer.hold("b", 6)
    writer.tell(followed)
    assert decide(followed) == decide(writer.holders) == ("b", {"hbm": 6, "recompute": 3}, 1.0, True)
    assert len(followed.runs(followed.index.hash_blocks(IDS, SIZE, "m", "", ()))) == 1


def test_a_reader_moves_to_another_index_only_when_told_and_never_mixes_their_slots(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1)
    followed = FollowedHolders(ReadsIndex(KEY), writer.told)
    writer.hold("a", 0)
    writer.hold("b", 6)
    writer.tell(followed)
    again = Writer(tmp_path, 2)
    again.hold("b", 0)  # the same slot numbers, of others
    again.hold("a", 3)
    remove_older(again.told)
    assert [path.name for path in tmp_path.glob("index.*")] == ["index.2"]
    assert decide(followed)[:2] == ("b", {"hbm": 6, "recompute": 3})
    assert followed.open(again.told)
    assert decide(followed)[1] == {"recompute": 9}
    again.tell(followed)
    assert decide(followed)[:2] == ("a", {"hbm": 3, "recompute": 6})


def test_an_index_of_another_key_or_of_nobody_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1)
    with pytest.raises(ValueError, match="key"):
        ReadsIndex(HashKey(bytes(range(16))))(writer.told)
    with pytest.raises(OSError, match="index"):
        ReadsIndex(KEY)(IndexTold(2, str(tmp_path / "index.2")))


def test_no_room_for_the_index_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.shared_dir"):
        write_shared_index(KEY, IndexLimits(), tmp_path / "nowhere", 1)
