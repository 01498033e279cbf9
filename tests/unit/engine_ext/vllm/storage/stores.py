# SPDX-License-Identifier: Apache-2.0
"""Workers for tests of the store: an engine's memory of a few small blocks, a store, and a listener."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eventually import eventually_now

from engine_ext.vllm.storage.announcements import Change
from engine_ext.vllm.storage.block_file import HEADER_BYTES, digest_of
from engine_ext.vllm.storage.config import read_config
from engine_ext.vllm.storage.jobs import Outcome
from engine_ext.vllm.storage.region import HostRegion
from engine_ext.vllm.storage.store import BlockStore
from engine_ext.vllm.storage.value import Weight

BLOCK_BYTES = 256
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES
BLOCKS = 64


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() + (0).to_bytes(4, "big")


def content_of(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(BLOCK_BYTES)


@dataclass(slots=True)
class Worker:
    """One worker's side: its memory, its store, and whoever listens to what it says."""

    store: BlockStore
    memory: bytearray
    heard: set[bytes] = field(default_factory=set)
    changes: list[Change] = field(default_factory=list)
    _jobs: int = 0

    def put(
        self, keys: Sequence[bytes], weight_s: float = 0.01, depths: Sequence[int] | None = None
    ) -> Outcome:
        for i, key in enumerate(keys):
            self.memory[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] = content_of(key)
        weights = [Weight(weight_s, depth) for depth in depths or range(len(keys))]
        self._jobs += 1
        self.store.submit_store(self._jobs, keys, list(range(len(keys))), weights)
        return self.finished()

    def get(self, keys: Sequence[bytes], weight_s: float = 0.01) -> dict[bytes, bytes]:
        """The bytes of those that came; blocks of the others are as they were."""
        self.memory[:] = b"?" * len(self.memory)
        self._jobs += 1
        self.store.submit_load(self._jobs, keys, list(range(len(keys))), Weight(weight_s))
        good = set(self.finished().good_keys)
        found = {}
        for i, key in enumerate(keys):
            block = bytes(self.memory[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])
            if key in good:
                found[key] = block
            else:
                assert block == b"?" * BLOCK_BYTES, "a block that did not come was written to"
        assert set(self.memory[len(keys) * BLOCK_BYTES :]) <= {ord("?")}
        return found

    def finished(self) -> Outcome:
        self.store.drain()
        (outcome,) = self.store.collect()
        return outcome

    def listen(self) -> set[bytes]:
        """The keys that a listener takes for stored, after everything that was said so far."""
        while self.store.known.has_news:
            for change in self.store.take_news():
                self.changes.append(change)
                if change.removed:
                    self.heard.difference_update(change.keys)
                else:
                    self.heard.update(change.keys)
        return self.heard

    def rescan(self) -> None:
        eventually_now(lambda: not self.store._tasks.scanning.is_set(), "the scan before")
        self.store._begin_scan(0.0)
        eventually_now(lambda: not self.store._tasks.scanning.is_set(), "the scan")


def files_of(root: Path) -> set[bytes]:
    """Keys of all block files below a root, whatever their fingerprint."""
    return {bytes.fromhex(path.name) for path in root.glob("*/*/*") if not path.name.startswith(".")}


def size_of(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("*/*/*"))


def open_worker(root: Path, blocks: int = BLOCKS, fingerprint: bytes = b"f", **entry: Any) -> Worker:
    """One more worker on that root, which has room for so many files. Close its store."""
    memory = bytearray(BLOCKS * BLOCK_BYTES)
    region = HostRegion(memoryview(memory).cast("B", (BLOCKS, BLOCK_BYTES)))
    defaults = {
        "root_dir": str(root),
        "capacity_bytes": blocks * FILE_BYTES,
        "read_threads": 2,
        "write_threads": 1,
        "trust_s": 0.0,
        "half_life_turnovers": 0.0,
        "report_interval_s": 0.0,
        "rescan_interval_s": 3600.0,
    }
    one = Worker(BlockStore(read_config(defaults | entry), digest_of(fingerprint), region), memory)
    assert one.store.wait_scanned(30)
    return one
