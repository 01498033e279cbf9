# SPDX-License-Identifier: Apache-2.0
"""A worker that the index has no room for: served without a map, and asked again with each poll."""

from __future__ import annotations

from typing import Any

import kv_batches as kv
import pytest

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import WorkerId
from indexer.index import IndexLimits, PrefixIndex, open_index
from router.config_fleet import parse_worker_argument
from router.fleet.static import spec_of_entry
from router.fleet.worker import ModelInfo, WorkerStatus
from router.ingest import WorkerIngest

WORKER = WorkerId("w")


class Filling:
    """An index that opens slots only while there is room."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.has_room = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def open(self, *arguments: Any) -> int:
        if not self.has_room:
            raise MemoryError
        return self._index.open(*arguments)


class Subscriber:
    """Whose streams are followed."""

    def __init__(self) -> None:
        self.added = 0

    def add(self, _: object) -> None:
        self.added += 1


def test_it_is_followed_once_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    index: Any = Filling(open_index(HashKey(kv.KEY_BYTES), IndexLimits()))
    holders = HolderTable(index, lambda: 0.0)
    subscriber: Any = Subscriber()
    ingest = WorkerIngest(holders, subscriber)
    spec = spec_of_entry(parse_worker_argument("http://h:1,events=tcp://h:2"))
    fleet: Any = type(
        "Fleet", (), {"get": lambda *_: WorkerStatus(spec, models={"m": ModelInfo("m", "m")})}
    )()
    for _ in range(2):
        ingest.polled(fleet, WORKER)
        assert (holders.workers(), subscriber.added) == ({}, 0)
    assert len([record for record in caplog.records if "no room" in record.getMessage()]) == 1
    index.has_room = True
    ingest.polled(fleet, WORKER)
    assert (list(holders.workers()), subscriber.added) == ([WORKER], 1)
