# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way from HBM to RAM: which workers have such, and for how long."""

from __future__ import annotations

from typing import Any

import kv_batches as kv
import pytest

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index
from router.config import load
from router.config_fleet import WorkerEntry, parse_worker_argument
from router.fleet.static import spec_of_entry
from router.fleet.worker import ModelInfo, WorkerStatus
from router.ingest import WorkerIngest

GRACE_S = 5.0


class Fleet:
    """One worker whose model is known."""

    def __init__(self, entry: WorkerEntry) -> None:
        self.status = WorkerStatus(spec_of_entry(entry), models={"m": ModelInfo("m", "m")})

    def get(self, _: str) -> WorkerStatus:
        return self.status


def demoting(entry: WorkerEntry, grace_s: float = GRACE_S) -> tuple[int, int]:
    """Blocks in HBM and demoting after two of three were removed, at once and when the grace is over."""
    now_s = [100.0]
    holders = HolderTable(open_index(HashKey(kv.KEY_BYTES), IndexLimits()), lambda: now_s[0])
    subscriber: Any = type("Nobody", (), {"add": lambda *_: None, "remove": lambda *_: None})()
    fleet: Any = Fleet(entry)
    WorkerIngest(holders, subscriber, offload_grace_s=grace_s).joined(fleet, "w")
    worker = WorkerId("w")
    holders.apply(WorkerRank(worker), 0, kv.batch(kv.stored([1, 2, 3]), kv.removed([2, 3])))
    slot = holders.workers()[worker].ranks[0].slot
    at_once = holders.index.counts(slot).demoting
    now_s[0] += GRACE_S + 1
    holders.tick()
    return at_once, holders.index.counts(slot).demoting


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ("", 0),
        (",p2p=h:1", 2),
        (",extension=h:1", 2),
        (",offloads=true", 2),
        (",p2p=h:1,offloads=false", 0),
    ],
)
def test_blocks_are_demoting_for_the_grace_where_the_engine_offloads(options: str, blocks: int) -> None:
    assert demoting(parse_worker_argument(f"http://h:1{options}")) == (blocks, 0)


def test_no_grace_is_none() -> None:
    assert demoting(parse_worker_argument("http://h:1,p2p=h:1"), grace_s=0.0) == (0, 0)


def test_the_grace_is_on_unless_it_is_set_to_nothing() -> None:
    assert load(environ={"HOME": "/h"}).index.offload_grace_s == 2.0
    environ = {"HOME": "/h", "POINTSMAN_INDEX__OFFLOAD_GRACE_S": "0"}
    assert load(environ=environ).index.offload_grace_s == 0.0
