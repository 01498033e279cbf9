# SPDX-License-Identifier: Apache-2.0
"""File systems that hang, are full or fail. A FIFO in a block's place hangs whoever opens it, as a dead server would."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from eventually import eventually_now

from engine_ext.vllm.storage import directory
from engine_ext.vllm.storage.health import Degraded, Health
from engine_ext.vllm.storage.lookups import Verdict
from engine_ext.vllm.storage.value import Weight

from .stores import BLOCK_BYTES, FILE_BYTES, Worker, content_of, files_of, key_of, size_of

Workers = Callable[..., Worker]
KEYS = [key_of(number) for number in range(20)]


@contextmanager
def hanging(worker: Worker, key: bytes) -> Iterator[Callable[[], None]]:
    """Whoever opens the block's file hangs until the yielded function is called."""
    path = worker.store.directory.path_of(worker.store.known.file_of(key))
    content = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    done = False

    def release() -> None:
        nonlocal done
        done = True
        with path.open("r+b", buffering=0) as pipe:
            path.unlink(missing_ok=True)
            pipe.write(content)
            eventually_now(lambda: not worker.store._readers.stuck(0.0), "the reader's return")

    try:
        yield release
    finally:
        if not done:
            release()


def test_a_load_fails_at_its_deadline_and_its_late_bytes_land_nowhere(
    worker: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker(load_deadline_s=0.2, read_threads=1)
    one.put(KEYS[:2])
    began, gate, real = threading.Event(), threading.Event(), directory._read_whole

    def hang(fd: int, buffer: memoryview) -> int:
        began.set()
        assert gate.wait(30)
        return real(fd, buffer)

    monkeypatch.setattr(directory, "_read_whole", hang)
    one.memory[:] = b"?" * len(one.memory)
    started_s = time.monotonic()
    one.store.submit_load(1, KEYS[:1], [5], Weight(0.01))
    outcome = one.finished()
    assert time.monotonic() - started_s < 10
    assert (outcome.success, outcome.late, outcome.good_keys) == (False, True, ())
    assert began.is_set()
    assert one.store.counts.take().errors == {"deadline": 1}
    gate.set()
    eventually_now(lambda: one.store.counts.take().read_blocks == 1, "the late read, whole and verified")
    assert bytes(one.memory) == b"?" * len(one.memory)
    one.store.step_end()
    assert one.get(KEYS[1:2]) == {KEYS[1]: content_of(KEYS[1])}, "the thread serves again"


def test_what_came_before_the_deadline_is_used(worker: Workers) -> None:
    one = worker(load_deadline_s=1.0, read_threads=2)
    one.put(KEYS[:3])
    with hanging(one, KEYS[1]):
        assert one.get(KEYS[:3]).keys() == {KEYS[0], KEYS[2]}


def test_hung_threads_are_a_named_state_that_ends_when_they_come_back(worker: Workers) -> None:
    one = worker(load_deadline_s=0.05, read_threads=1)
    one.put(KEYS[:2])
    with hanging(one, KEYS[0]) as release:
        assert one.get(KEYS[:1]) == {}
        one.store.step_end()
        assert one.store.degraded() == {Degraded.HUNG}
        assert one.store.lookup(KEYS[1], "r") is Verdict.MISS
        assert one.get(KEYS[1:2]) == {}
        assert not one.put(KEYS[2:3]).success
        assert one.store.counts.take().refused == {"degraded": 2}
        release()
    one.store.step_end()
    assert one.store.degraded() == frozenset()
    assert one.get(KEYS[1:2])


def test_a_reset_waits_no_longer_than_the_deadline(worker: Workers) -> None:
    one = worker(load_deadline_s=0.2, read_threads=1)
    one.put(KEYS[:1])
    with hanging(one, KEYS[0]):
        one.store.submit_load(1, KEYS[:1], [0], Weight(0.01))
        one.store.drain()
        assert [outcome.success for outcome in one.store.collect()] == [False]


def test_a_store_closes_though_a_thread_hangs(worker: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_ext.vllm.storage.store._CLOSE_WAIT_S", 0.1)
    one = worker(load_deadline_s=60.0, read_threads=1)
    one.put(KEYS[:1])
    with hanging(one, KEYS[0]):
        one.store.submit_load(1, KEYS[:1], [0], Weight(0.01))
        one.store.close()
        one.memory.clear()  # raises while anybody holds a view of it


def test_an_unanswered_lookup_is_a_miss_at_its_deadline(
    worker: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker(lookup_deadline_s=0.05)
    monkeypatch.setattr(one.store, "_seekers", _Nobody())
    eventually_now(lambda: one.store.lookup(KEYS[0], "r") is Verdict.MISS, "a verdict")


class _Nobody:
    def put(self, task: object) -> None:
        """Never runs it."""

    def stop(self, wait_s: float) -> bool:
        return True


def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Every write of a block fails with this errno from now on; returns the descriptors that were tried."""
    tried: list[int] = []
    real = os.write

    def write(fd: int, data: memoryview | bytes) -> int:
        if len(data) <= BLOCK_BYTES:
            return real(fd, data)
        tried.append(fd)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(directory.os, "write", write)
    return tried


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_stops_stores_and_not_loads(
    worker: Workers, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    one = worker(retry_s=0.2)
    one.put(KEYS[:6])
    with monkeypatch.context() as patched:
        failing(patched, number)
        assert not one.put(KEYS[6:8]).success
        assert one.store.degraded() == {Degraded.DISK_FULL}
        assert not one.put(KEYS[8:9]).success
        sums = one.store.counts.take()
        assert sums.errors == {"disk_full": 1}
        assert sums.refused == {"degraded": 1}
        assert sums.evictions == 2, "as much as was to be written made way for a second try"
    assert len(one.get(KEYS[:6])) == 4
    assert size_of(root) == one.store.room.total_bytes == 4 * FILE_BYTES
    assert not list(root.rglob("*.tmp"))
    eventually_now(lambda: not one.store.degraded(), "the next try")
    assert one.put(KEYS[6:8]).success


def test_errors_in_a_row_degrade_the_store_until_it_is_tried_again(
    worker: Workers, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker(retry_s=0.2)
    one.put(KEYS[:1])
    with monkeypatch.context() as patched:
        failing(patched, errno.EIO)
        for _ in range(3):
            assert not one.put(KEYS[1:3]).success
        assert one.store.counts.take().errors == {"io": 3}
        assert one.store.degraded() == {Degraded.IO_ERRORS}
        assert one.store.lookup(KEYS[0], "r") is Verdict.MISS
    assert files_of(root) == {KEYS[0]}
    assert one.store.room.total_bytes == FILE_BYTES
    eventually_now(lambda: not one.store.degraded(), "the next try")
    assert one.put(KEYS[1:3]).success
    assert one.get(KEYS[:3])


def test_a_frozen_worker_that_holds_the_ledger_stops_stores_and_not_loads(worker: Workers) -> None:
    one, frozen = worker(), worker()
    one.store.ledger._wait_s = 0.05
    one.put(KEYS[:2])
    with frozen.store.ledger.held():
        assert not one.put(KEYS[2:4]).success
        assert one.store.degraded() == {Degraded.LEDGER_BUSY}
        assert len(one.get(KEYS[:2])) == 2


def test_a_success_between_errors_keeps_the_store_in_use() -> None:
    health = Health(10.0)
    for _ in range(5):
        health.io_error(0.0)
        health.io_error(0.0)
        health.good()
    assert health.loads(0.0)
    for _ in range(3):
        health.io_error(0.0)
    assert not health.loads(9.9)
    assert health.loads(10.0)
