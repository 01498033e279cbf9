# SPDX-License-Identifier: Apache-2.0
"""Two workers of one fingerprint and one of another on one directory, against the files themselves.

Every load gives the block's bytes or nothing, the capacity is never exceeded, and what each worker said is what it
knows; after a rescan that is what the directory holds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_ext.vllm.storage.block_file import find_defect

from .stores import BLOCK_BYTES, FILE_BYTES, Worker, content_of, key_of, open_worker, size_of

CAPACITY_BLOCKS = 6
keys = st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True).map(
    lambda numbers: [key_of(number) for number in numbers]
)
who = st.integers(0, 2)


class SharedStore(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.root = Path(self.temporary.name) / "store"
        self.workers = [self.opened(number) for number in range(3)]

    def opened(self, number: int) -> Worker:
        fingerprint = b"other" if number == 2 else b"f"
        return open_worker(
            self.root, blocks=CAPACITY_BLOCKS, fingerprint=fingerprint, read_threads=1, trust_s=0.0
        )

    @rule(number=who, keys=keys, weight_s=st.sampled_from([0.001, 0.1, 10.0]))
    def store(self, number: int, keys: list[bytes], weight_s: float) -> None:
        assert self.workers[number].put(keys, weight_s=weight_s).success

    @rule(number=who, keys=keys)
    def load(self, number: int, keys: list[bytes]) -> None:
        whole = self.own_files(number) - self.damaged(number)
        found = self.workers[number].get(keys)
        assert found == {key: content_of(key) for key in keys if key in whole}

    @rule(number=who, keys=keys, cut=st.integers(0, FILE_BYTES - 1))
    def damage(self, number: int, keys: list[bytes], cut: int) -> None:
        worker = self.workers[number]
        for key in keys[:1]:
            path = worker.store.directory.path_of(worker.store.known.file_of(key))
            if path.exists():
                content = bytearray(path.read_bytes())
                content[cut] ^= 0xFF
                path.write_bytes(content)

    @rule(number=who, keys=keys)
    def remove_behind_their_backs(self, number: int, keys: list[bytes]) -> None:
        worker = self.workers[number]
        for key in keys[:2]:
            worker.store.directory.path_of(worker.store.known.file_of(key)).unlink(missing_ok=True)

    @rule(number=who)
    def restart(self, number: int) -> None:
        self.workers[number].store.close()
        self.workers[number] = self.opened(number)
        assert self.workers[number].listen() == self.own_files(number)

    @rule(number=who)
    def rescan(self, number: int) -> None:
        self.workers[number].rescan()
        assert self.workers[number].listen() == self.own_files(number)

    @rule(number=who, keys=keys)
    def touch(self, number: int, keys: list[bytes]) -> None:
        self.workers[number].store.touch(keys)

    def own_files(self, number: int) -> set[bytes]:
        folder = self.root / self.workers[number].store.known.folder
        return {bytes.fromhex(path.name) for path in folder.glob("*/*")}

    def damaged(self, number: int) -> set[bytes]:
        folder = self.root / self.workers[number].store.known.folder
        return {bytes.fromhex(path.name) for path in folder.glob("*/*") if not _whole(path)}

    @invariant()
    def capacity_is_kept(self) -> None:
        assert size_of(self.root) <= CAPACITY_BLOCKS * FILE_BYTES

    @invariant()
    def what_was_said_is_what_is_known(self) -> None:
        for worker in self.workers:
            assert worker.listen() == worker.store.known.keys()
            assert not worker.store.known.faults()

    def teardown(self) -> None:
        for worker in getattr(self, "workers", []):
            worker.store.close()
        if hasattr(self, "temporary"):
            self.temporary.cleanup()


def _whole(path: Path) -> bool:
    content = path.read_bytes()
    digest = bytes.fromhex(path.parts[-3])
    return (
        find_defect(memoryview(content), len(content), digest, bytes.fromhex(path.name), BLOCK_BYTES) is None
    )


TestSharedStore = SharedStore.TestCase
TestSharedStore.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
