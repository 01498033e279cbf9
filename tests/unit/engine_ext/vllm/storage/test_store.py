# SPDX-License-Identifier: Apache-2.0
"""One worker and its directory: bytes, capacity, order of eviction, restarts, damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_ext.vllm.storage.config import StorageConfigError, read_config
from engine_ext.vllm.storage.directory import Outgoing
from engine_ext.vllm.storage.lookups import Verdict
from engine_ext.vllm.storage.value import Weight

from .stores import BLOCK_BYTES, FILE_BYTES, Worker, content_of, files_of, key_of, size_of

Workers = Callable[..., Worker]
KEYS = [key_of(number) for number in range(20)]


def found(worker: Worker, keys: list[bytes], request: str = "r") -> list[bool]:
    """The verdicts once they are there."""
    while True:
        verdicts = [worker.store.lookup(key, request) for key in keys]
        if Verdict.WAIT not in verdicts:
            worker.store.forget_request(request)
            return [one is Verdict.HIT for one in verdicts]
        worker.store.step_end()


def path_of(worker: Worker, key: bytes) -> Path:
    return worker.store.directory.path_of(worker.store.known.file_of(key))


def test_what_was_stored_comes_back_byte_for_byte(worker: Workers) -> None:
    one = worker()
    assert one.put(KEYS).success
    assert one.get(KEYS) == {key: content_of(key) for key in KEYS}


def test_a_lookup_finds_what_is_there_and_nothing_else(worker: Workers) -> None:
    one = worker()
    one.put(KEYS[:2])
    assert found(one, KEYS[:4]) == [True, True, False, False]


@pytest.mark.parametrize("trust_s", [0.0, 60.0])
def test_a_lookup_trusts_a_fresh_sight_only_where_told_to(worker: Workers, trust_s: float) -> None:
    one = worker(trust_s=trust_s)
    one.put(KEYS[:1])
    path_of(one, KEYS[0]).unlink()
    assert found(one, KEYS[:1]) == [trust_s > 0]
    assert one.get(KEYS[:1]) == {}
    assert found(one, KEYS[:1], "another request") == [False]


def test_a_load_of_some_that_are_gone_brings_the_others(worker: Workers) -> None:
    one = worker()
    one.put(KEYS[:4])
    path_of(one, KEYS[1]).unlink()
    assert set(one.get(KEYS[:6])) == {KEYS[0], KEYS[2], KEYS[3]}


def test_storing_what_is_stored_writes_nothing_and_counts_as_a_use(worker: Workers, root: Path) -> None:
    one = worker()
    one.put(KEYS)
    one.store.counts.take()
    before = path_of(one, KEYS[0]).stat()
    assert one.put(KEYS).success
    assert one.store.counts.take().written_blocks == 0
    assert path_of(one, KEYS[0]).stat().st_ino == before.st_ino
    assert path_of(one, KEYS[0]).stat().st_mtime_ns > before.st_mtime_ns
    assert size_of(root) == one.store.room.total_bytes == len(KEYS) * FILE_BYTES


def test_capacity_is_kept_and_the_deepest_of_equal_blocks_go_first(worker: Workers, root: Path) -> None:
    one = worker(blocks=10)
    one.put(KEYS[:10])
    one.put(KEYS[10:14])
    assert size_of(root) <= 10 * FILE_BYTES
    assert files_of(root) & set(KEYS[:10]) == set(KEYS[:6])


def test_the_block_of_least_worth_goes_first(worker: Workers, root: Path) -> None:
    one = worker(blocks=10)
    one.put(KEYS[:5], weight_s=0.01)
    one.put(KEYS[5:10], weight_s=0.1)
    one.get(KEYS[:2], weight_s=1.0)
    one.put(KEYS[10:13], weight_s=0.1)
    assert files_of(root) == {*KEYS[:2], *KEYS[5:13]}


def test_new_blocks_displace_those_that_were_used_twice_before_the_directory_turned_over(
    worker: Workers, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1_000_000.0
    monkeypatch.setattr("engine_ext.vllm.storage.directory.time.time", lambda: now_s)
    one = worker(blocks=8, half_life_turnovers=0.5)
    one.put(KEYS[:8])
    one.get(KEYS[:8])
    for start in range(8, 20, 2):
        now_s += 1000.0
        one.put(KEYS[start : start + 2])
    assert one.store.known.half_life_s == pytest.approx(2000.0, rel=0.3)
    assert files_of(root) == set(KEYS[12:20])


def test_a_touch_keeps_a_block(worker: Workers, root: Path) -> None:
    one = worker(blocks=4, block_rebuild_s=1.0)
    one.put(KEYS[:4], weight_s=0.01)
    one.store.touch([KEYS[3]])
    one.put(KEYS[4:6], weight_s=0.02, depths=[0, 1])
    assert KEYS[3] not in files_of(root) or KEYS[2] not in files_of(root)
    assert len(files_of(root)) == 4


def test_a_restart_finds_everything_with_its_worth_and_says_so_in_batches(
    worker: Workers, root: Path
) -> None:
    first = worker(blocks=10)
    first.put(KEYS[:5], weight_s=0.01)
    first.put(KEYS[5:10], weight_s=0.1)
    first.store.close()
    second = worker(blocks=10, report_keys_per_step=3)
    assert second.listen() == set(KEYS[:10])
    assert max(len(change.keys) for change in second.changes) == 3
    second.put(KEYS[10:13], weight_s=0.05)
    assert files_of(root) == {*KEYS[:2], *KEYS[5:13]}
    assert second.get(KEYS[5:10]) == {key: content_of(key) for key in KEYS[5:10]}


@pytest.mark.parametrize("cause", ["evicted", "evicted and stored again", "damaged"])
def test_what_a_killed_worker_removed_and_never_said_is_said_by_its_successor(
    worker: Workers, root: Path, cause: str
) -> None:
    first = worker(blocks=4)
    first.put(KEYS[:4])
    before = set(first.listen())
    if cause.startswith("evicted"):
        first.put(KEYS[4:6])
        first.put(list(before - files_of(root)) if cause.endswith("again") else [])
    else:
        (path,) = root.glob(f"*/*/{KEYS[2].hex()}")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert KEYS[2] not in first.get(KEYS[:4])
    assert before - files_of(root)
    second = worker(blocks=4)  # nobody heard what the first one had to say
    second.heard = before
    assert second.listen() == files_of(root)
    assert not {key for change in second.changes if change.removed for key in change.keys} & files_of(root)


def test_a_second_report_says_it_all_again(worker: Workers) -> None:
    one = worker()
    one.put(KEYS)
    one.listen()
    one.heard.clear()
    one.store.known.begin_report()
    assert one.store.busy, "an idle engine goes on until it is said"
    assert one.listen() == set(KEYS)
    assert not one.store.busy


def test_every_key_is_said_to_be_stored_before_it_is_said_to_be_removed(worker: Workers) -> None:
    one = worker(blocks=4)
    for start in range(0, 20, 2):
        one.put(KEYS[start : start + 2])
    one.listen()
    seen: set[bytes] = set()
    for change in one.changes:
        if change.removed:
            assert seen >= set(change.keys)
            seen.difference_update(change.keys)
        else:
            seen.update(change.keys)
    assert seen == one.store.known.keys()
    assert len(seen) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-4] + b"!!!!"),
        lambda path: path.write_bytes(b"!" + path.read_bytes()[1:]),
        lambda path: path.write_bytes(bytes(FILE_BYTES)),
    ],
    ids=["short", "long", "empty", "payload", "header", "zeros"],
)
def test_a_damaged_file_is_a_miss_and_is_replaced(
    worker: Workers, root: Path, damage: Callable[[Path], object]
) -> None:
    one = worker()
    one.put(KEYS[:3])
    damage(path_of(one, KEYS[1]))
    assert set(one.get(KEYS[:3])) == {KEYS[0], KEYS[2]}
    assert one.store.counts.take().errors == {"defective": 1}
    assert one.listen() == {KEYS[0], KEYS[2]}
    assert found(one, KEYS[:3]) == [True, False, True]
    one.put(KEYS[:3])
    assert one.get(KEYS[:3]) == {key: content_of(key) for key in KEYS[:3]}
    assert one.listen() == set(KEYS[:3])


def test_the_file_of_another_block_under_a_blocks_name_is_a_miss(worker: Workers) -> None:
    one = worker()
    one.put(KEYS[:2])
    shutil.copy(path_of(one, KEYS[0]), path_of(one, KEYS[1]))
    assert set(one.get(KEYS[:2])) == {KEYS[0]}


def test_fingerprints_share_a_root_and_its_capacity_but_no_block(worker: Workers, root: Path) -> None:
    one, other = worker(blocks=10, fingerprint=b"one"), worker(blocks=10, fingerprint=b"other")
    one.put(KEYS[:8], weight_s=0.01)
    assert other.get(KEYS[:8]) == {}
    assert found(other, KEYS[:8]) == [False] * 8
    other.rescan()
    other.put(KEYS[:8], weight_s=0.1)
    assert size_of(root) <= 10 * FILE_BYTES
    assert other.get(KEYS[:8]).keys() == set(KEYS[:8])
    assert other.listen() == set(KEYS[:8])
    one.rescan()
    assert one.listen() == one.store.known.keys() == set(KEYS[:2])


def test_a_store_larger_than_the_capacity_is_refused_in_part(worker: Workers, root: Path) -> None:
    one = worker(blocks=1)
    outcome = one.put(KEYS[:3])
    assert outcome.success
    assert size_of(root) <= FILE_BYTES
    (root / "cannot").mkdir()
    assert not worker(blocks=1, fingerprint=b"g").put([]).keys


def test_a_bounded_queue_refuses_and_counts(worker: Workers) -> None:
    one = worker(queued_blocks=4)
    outcome = one.put(KEYS[:5])
    assert not outcome.success
    assert outcome.good_keys == ()
    assert one.store.counts.take().refused == {"queue": 5}
    assert one.put(KEYS[:4]).success


def test_an_empty_job_is_over_at_once(worker: Workers) -> None:
    one = worker()
    one.store.submit_store(1, [], [], [])
    assert one.store.collect()[0].success


def test_whole_directories_may_vanish(worker: Workers, root: Path) -> None:
    one = worker()
    one.put(KEYS)
    shutil.rmtree(root)
    assert one.get(KEYS[:2]) == {}
    one.rescan()
    assert one.listen() == set()
    one.put(KEYS[:3])
    assert one.get(KEYS[:3]) == {key: content_of(key) for key in KEYS[:3]}
    assert one.listen() == set(KEYS[:3])
    assert one.store.room.total_bytes == 3 * FILE_BYTES


def test_files_that_are_not_ours_are_left_alone(worker: Workers, root: Path) -> None:
    one = worker(blocks=2)
    one.put(KEYS[:2])
    shelf = path_of(one, KEYS[0]).parent
    (shelf / "notes.txt").write_text("mine")
    (root / "README").write_text("mine")
    one.rescan()
    one.put(KEYS[2:6])
    assert (shelf / "notes.txt").read_text() == (root / "README").read_text() == "mine"


def test_what_a_killed_writer_left_unfinished_is_removed_after_a_while(worker: Workers) -> None:
    one = worker(orphan_s=0.001)
    one.put(KEYS[:1])
    orphan = path_of(one, KEYS[0]).parent / f".{KEYS[1].hex()[:32]}.0123456789abcdef.tmp"
    orphan.write_bytes(b"half")
    assert one.get(KEYS[1:2]) == {}
    for _ in range(100):
        one.rescan()
        if not orphan.exists():
            break
    assert not orphan.exists()
    assert one.get(KEYS[:1])


def test_bytes_that_a_killed_worker_had_reserved_are_given_back(worker: Workers) -> None:
    one = worker(blocks=10)
    one.put(KEYS[:4])
    with one.store.ledger.held():
        one.store.room.enter(100 * FILE_BYTES)
    for _ in range(5):
        one.rescan()
    assert one.store.room.total_bytes == 4 * FILE_BYTES
    one.put(KEYS[4:10])
    assert len(one.get(KEYS[:10])) == 10


def test_the_ledger_is_made_again_from_the_files(worker: Workers, root: Path) -> None:
    one = worker(blocks=10)
    one.put(KEYS[:8])
    (root / "pointsman.ledger").write_bytes(b"garbage")
    one.put(KEYS[8:12])
    assert size_of(root) == one.store.room.total_bytes == 10 * FILE_BYTES


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"capacity_bytes": 1}, "root_dir"),
        ({"root_dir": "/x"}, "capacity_bytes"),
        ({"root_dir": "/x", "capacity_bytes": 0}, "capacity_bytes"),
        ({"root_dir": "/x", "capacity_bytes": 1, "read_threads": 0}, "read_threads"),
        ({"root_dir": "/x", "capacity_bytes": 1, "locality": "NEAR"}, "locality"),
        ({"root_dir": "/x", "capacity_bytes": 1, "rootdir": "/y"}, "rootdir"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(entry: dict[str, object], named: str) -> None:
    with pytest.raises(StorageConfigError, match=named):
        read_config(entry)


def test_loads_under_way_are_not_evicted_by_their_own_worker(worker: Workers, root: Path) -> None:
    one = worker(blocks=4)
    one.put(KEYS[:4], weight_s=0.01)
    one.store.known.begin_reads(KEYS[:2])
    one.put(KEYS[4:6], weight_s=1.0, depths=[0, 0])
    assert files_of(root) == {*KEYS[:2], *KEYS[4:6]}
    for key in KEYS[:2]:
        one.store.known.end_read(key)
    one.put(KEYS[6:8], weight_s=1.0, depths=[0, 0])
    assert files_of(root) == {*KEYS[4:8]}


def test_a_reader_that_has_opened_a_file_reads_it_to_the_end_though_it_is_evicted(worker: Workers) -> None:
    one = worker()
    one.put(KEYS[:1])
    path = path_of(one, KEYS[0])
    content = path.read_bytes()
    with path.open("rb") as opened:
        with one.store.ledger.held():
            one.store.room.evict(1)
        assert not path.exists()
        assert opened.read() == content


def test_weights_of_a_job_are_those_of_its_blocks(worker: Workers) -> None:
    one = worker()
    one.store.submit_store(1, KEYS[:2], [0, 1], [Weight(4.0, 7), Weight(0.5, 8)])
    one.finished()
    entry = one.store.known.get(one.store.known.file_of(KEYS[0]))
    assert entry is not None
    assert (entry.use.worth, entry.use.depth, entry.size_bytes) == (4.0, 7, BLOCK_BYTES + 64)
    assert os.stat(path_of(one, KEYS[0])).st_mtime_ns == entry.use.to_mtime_ns()


def test_blocks_of_a_job_that_is_over_do_not_appear(worker: Workers, root: Path) -> None:
    one = worker()
    content = bytearray(FILE_BYTES)
    block = Outgoing(KEYS[0], memoryview(content), Weight(1.0))
    assert one.store.directory.write([block], lambda: False) == 0
    assert not list(root.rglob("*.tmp"))
    assert files_of(root) == one.listen() == set()
    assert one.store.room.total_bytes == 0
