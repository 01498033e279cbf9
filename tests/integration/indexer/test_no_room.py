# SPDX-License-Identifier: Apache-2.0
"""An index without room, fed over real sockets: the thread that feeds it goes on, and says what it lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import full_file_system
import pytest
from eventually import eventually_now
from kv_batches import KEY_BYTES, batch, removed, stored
from kv_publisher import ScriptedEngine

from indexer.hashing import HashKey
from indexer.holders import EMPTIED, NO_ROOM, HolderTable
from indexer.identity import WorkerRank
from indexer.index import IndexLimits, open_index
from indexer.subscriber import EventSubscriber

from .conftest import Indexer

TOO_LARGE = batch(["Padding", bytes(2_000_000)])
"""A file for so few blocks has no room for all that a batch of this size might store."""
MOST_BLOCKS = 100


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Indexer]:
    index = open_index(HashKey(KEY_BYTES), IndexLimits(max_blocks=MOST_BLOCKS), path=tmp_path / "index")
    holders = HolderTable(index, time.monotonic)
    subscriber = EventSubscriber(holders, time.monotonic, replay_timeout_s=1.0)
    subscriber.start()
    yield Indexer(holders, subscriber)
    subscriber.stop()
    assert index.check() == ""


def test_a_batch_without_room_is_dropped_counted_and_named_and_the_stream_goes_on(small: Indexer) -> None:
    with ScriptedEngine() as engine, ScriptedEngine() as other:
        small.follow("w", engine)
        small.follow("other", other)
        engine.batch(batch(stored([1, 2])))
        small.wait_seq("w", 0)
        engine.batch(TOO_LARGE)
        small.wait_seq("w", 1)
        assert small.state("w").partial == NO_ROOM
        assert small.state("w").totals["refused_batches"] == 1
        engine.batch(batch(stored([3], parent=2)))
        other.batch(batch(stored([1])))
        small.wait_seq("w", 2)
        small.wait_seq("other", 0)
        assert small.matched([1, 2, 3]) == {("w", 0): 3, ("other", 0): 1}
        assert small.state("other").partial is None


def test_a_rank_that_finds_no_room_twice_starts_over_and_follows_its_engine_again(small: Indexer) -> None:
    with ScriptedEngine() as engine:
        small.follow("w", engine)
        engine.batch(batch(stored([1, 2])))
        small.wait_seq("w", 0)
        for seq in (1, 2):
            engine.batch(TOO_LARGE)
            small.wait_seq("w", seq)
        assert small.state("w").partial == EMPTIED
        assert small.matched([1, 2]) == {}
        engine.batch(batch(stored([5, 6, 7])))
        engine.batch(batch(removed([7])))
        small.wait_seq("w", 4)
        assert small.matched([5, 6, 7]) == {("w", 0): 2}


def test_more_blocks_than_the_bound_push_out_those_that_nobody_asks_for(small: Indexer) -> None:
    wanted = list(range(1, 21))
    with ScriptedEngine() as engine:
        small.follow("w", engine)
        engine.batch(batch(stored(wanted)))
        small.wait_seq("w", 0)
        for seq in range(1, 41):
            assert small.matched(wanted) == {("w", 0): 20}
            engine.batch(batch(stored(list(range(seq * 1000, seq * 1000 + 10)))))
            small.wait_seq("w", seq)
        assert small.holders.index.counts(small.state("w").slot).hbm <= MOST_BLOCKS
        assert (
            small.state("w").totals["evicted"] == 420 - small.holders.index.counts(small.state("w").slot).hbm
        )
        assert small.state("w").partial is None
        eventually_now(lambda: small.matched(wanted) == {("w", 0): 20}, "what is asked for")


def test_an_index_on_a_full_file_system_stays_consistent_and_follows_what_it_has_room_for(
    tmp_path: Path,
) -> None:
    mounts = f'mount -t tmpfs -o size=3M tmpfs "{tmp_path}"'
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*alone, mounts], check=False, capture_output=True).returncode:
        pytest.skip("no file system of limited size can be mounted here")
    program = Path(full_file_system.__file__)
    run = f'{mounts} && exec "{sys.executable}" "{program}" "{tmp_path}"'
    done = subprocess.run([*alone, run], check=True, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    assert found["problem"] == ""
    assert sum(found["refused"]) > 0
    assert max(found["blocks"]) > 0
    assert EMPTIED in found["partial"]
    assert max(found["seq"]) == full_file_system.BATCHES - 1
    assert done.stderr.count("no room left") <= 2 * full_file_system.WORKERS


def test_events_that_cannot_be_applied_for_any_other_reason_end_no_thread(
    small: Indexer, caplog: pytest.LogCaptureFixture
) -> None:
    apply_many = small.holders.apply_many

    def failing(rank: WorkerRank, last_seq: int, payloads: Sequence[bytes]) -> None:
        if rank.worker == "bad" and last_seq < 3:
            raise ValueError("no such thing")
        apply_many(rank, last_seq, payloads)

    with ScriptedEngine() as bad, ScriptedEngine() as good:
        small.holders.apply_many = failing  # type: ignore[method-assign]
        small.follow("bad", bad)
        small.follow("good", good)
        for seq in range(3):
            bad.batch(batch(stored([10 * seq + 1])))
        good.batch(batch(stored([1])))
        small.wait_seq("good", 0)
        bad.batch(batch(stored([40])))
        small.wait_seq("bad", 3)
        assert small.state("bad").partial == "events could not be applied: no such thing"
        assert small.state("good").partial is None
    assert [record.message.count("could not be applied") for record in caplog.records] == [1]
