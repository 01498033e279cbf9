# SPDX-License-Identifier: Apache-2.0
"""Several workers on one directory, in one process and in several, some of which are killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from eventually import eventually_now

from .stores import FILE_BYTES, Worker, content_of, files_of, key_of, size_of

Workers = Callable[..., Worker]
WRITER = Path(__file__).with_name("writer.py")
KEYS = [key_of(number) for number in range(200)]


def start(root: Path, blocks: int, seed: int, rounds: int) -> subprocess.Popen[str]:
    words = [sys.executable, WRITER, root, blocks, seed, rounds]
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_one_worker_reads_what_another_stored_and_tells_its_router_of_it(worker: Workers) -> None:
    one, other = worker(), worker()
    one.put(KEYS[:8])
    assert other.get(KEYS[:8]) == {key: content_of(key) for key in KEYS[:8]}
    assert other.listen() == one.listen() == set(KEYS[:8])


def test_workers_keep_one_capacity_together(worker: Workers, root: Path) -> None:
    one, other = worker(blocks=10), worker(blocks=10)
    for begin in range(0, 40, 4):
        (one if begin % 8 else other).put(KEYS[begin : begin + 4])
        assert size_of(root) <= 10 * FILE_BYTES
    assert size_of(root) == 10 * FILE_BYTES


def test_a_block_that_another_worker_uses_is_not_the_cheapest(worker: Workers, root: Path) -> None:
    one, other = worker(blocks=4), worker(blocks=4)
    one.put(KEYS[:4], weight_s=0.01, depths=[0, 0, 0, 0])
    assert other.get(KEYS[:2], weight_s=1.0).keys() == set(KEYS[:2])
    one.put(KEYS[4:6], weight_s=0.1)
    assert files_of(root) == {*KEYS[:2], *KEYS[4:6]}


def test_a_rescan_hears_of_what_others_stored_and_evicted(worker: Workers) -> None:
    one, other = worker(blocks=8), worker(blocks=8)
    one.put(KEYS[:8])
    other.rescan()
    assert other.listen() == set(KEYS[:8])
    one.put(KEYS[8:16], weight_s=1.0)
    other.rescan()
    assert other.listen() == one.listen() == set(KEYS[8:16])


def test_a_worker_that_knows_of_nothing_evicts_what_others_stored(worker: Workers, root: Path) -> None:
    other, one = worker(blocks=8), worker(blocks=8)
    one.put(KEYS[:8])
    other.put(KEYS[8:12])
    assert size_of(root) == 8 * FILE_BYTES
    assert files_of(root) >= set(KEYS[8:12])


def test_two_workers_that_write_one_block_at_once_count_it_once(
    worker: Workers, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = worker(), worker()
    one.put(KEYS[:4])
    monkeypatch.setattr(other.store.directory, "_already_there", lambda block: False)
    assert other.put(KEYS[:6]).success
    with one.store.ledger.held():
        assert one.store.ledger.read() == size_of(root) == 6 * FILE_BYTES
        assert one.store.ledger.read_written() == 6 * FILE_BYTES


def test_processes_share_a_directory_without_a_wrong_byte(worker: Workers, root: Path) -> None:
    one = worker(blocks=50)
    processes = [start(root, 50, seed, 150) for seed in (1, 2)]
    results = []
    for process in processes:
        with process:
            out, _ = process.communicate(timeout=120)
            results.append(out.split())
    assert [result[:2] for result in results] == [["done", "0"]] * 2
    assert sum(int(result[2]) for result in results) > 100
    assert size_of(root) <= 50 * FILE_BYTES
    found = one.get(KEYS[:64])
    assert found == {key: content_of(key) for key in found}
    one.rescan()
    assert one.listen() == files_of(root)
    with one.store.ledger.held():
        assert one.store.ledger.read() == size_of(root)


def test_a_process_killed_at_any_moment_leaves_whole_blocks_and_no_lost_room(
    worker: Workers, root: Path
) -> None:
    one = worker(blocks=50, orphan_s=0.001)
    for seed in range(6):
        with start(root, 50, seed, 1_000_000) as process:
            before = len(files_of(root))
            eventually_now(
                lambda n=before: n < len(files_of(root)) or len(files_of(root)) >= 40, "some blocks"
            )
            process.kill()
        for begin in range(0, 200, 50):
            keys = KEYS[begin : begin + 50]
            found = one.get(keys)
            assert found == {key: content_of(key) for key in found}
        assert one.store.counts.take().errors.get("defective", 0) == 0, "files appear whole"
    for _ in range(5):
        one.rescan()
    eventually_now(lambda: one.rescan() or not list(root.rglob("*.tmp")), "unfinished files to be removed")
    assert one.listen() == files_of(root)
    assert one.store.room.total_bytes == size_of(root) <= 50 * FILE_BYTES
