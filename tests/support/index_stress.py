# SPDX-License-Identifier: Apache-2.0
"""One process that changes an index in a file all the time, and others that read it and know what must be true.

The writer keeps, in a file of its own, one word per worker and chain of blocks: ``4 * changes + state``. A reader looks
at it before and after a match: where it has not moved, and says *whole* or *nothing*, the match must have said exactly
that; and at no time may a chain be held by a worker that never stores it.
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path
from random import Random

import kv_batches as kv

from indexer.hashing import HashKey
from indexer.identity import WorkerId
from indexer.index import IndexLimits, PrefixIndex, open_index, open_reader
from indexer.slot_names import SlotName, parse_slot_name

KEY = HashKey(kv.KEY_BYTES)
LIMITS = IndexLimits(remembered_blocks=64, max_blocks=1_000_000)
WORKERS, CHAINS, LENGTH = 6, 24, 40
NOTHING, WHOLE, CHANGING = 0, 1, 2


def stores(worker: int, chain: int) -> bool:
    """Whether the worker ever holds the chain."""
    return (worker + chain) % 3 != 0


def names(chain: int) -> list[int]:
    return [chain * 100 + i for i in range(1, LENGTH + 1)]


class Truth:
    """The words of all workers and chains."""

    def __init__(self, path: Path, *, new: bool) -> None:
        size = 8 * WORKERS * CHAINS
        if new:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), size)).cast("Q")

    def get(self, worker: int, chain: int) -> int:
        return self._words[worker * CHAINS + chain]

    def set(self, worker: int, chain: int, state: int) -> None:
        at = worker * CHAINS + chain
        self._words[at] = (self._words[at] // 4 + 1) * 4 + state


class Writer:
    """Workers that store and remove chains, clear and restart; beside them one whose blocks only come and go."""

    def __init__(self, directory: Path, truth: Truth, seed: int) -> None:
        self.index: PrefixIndex = open_index(KEY, LIMITS, path=directory / "index")
        self.truth = truth
        self._random = Random(seed)
        self._incarnation = 0
        self._slots = [self._open(worker) for worker in range(WORKERS)]
        self._filler = self.index.open("filler", False)
        self._fillers: list[list[int]] = []

    def rebuild(self) -> None:
        """Store what the truth says is whole, settle what was under way, and let readers come."""
        for worker in range(WORKERS):
            for chain in range(CHAINS):
                state = self.truth.get(worker, chain) % 4
                if state == CHANGING:
                    self.truth.set(worker, chain, NOTHING)
                elif state == WHOLE:
                    self._apply(worker, kv.stored(names(chain)))
        self.index.publish()

    def step(self) -> None:
        choice, worker = self._random.random(), self._random.randrange(WORKERS)
        if choice < 0.002:
            self._all_gone(worker, restart=True)
        elif choice < 0.004:
            self._all_gone(worker, restart=False)
        elif choice < 0.2:
            self._fill()
        else:
            self._turn(worker, self._random.randrange(CHAINS))

    def _turn(self, worker: int, chain: int) -> None:
        if not stores(worker, chain):
            return
        whole = self.truth.get(worker, chain) % 4 == WHOLE
        blocks = names(chain)
        self.truth.set(worker, chain, CHANGING)
        if whole:
            self._apply(worker, kv.removed(blocks[LENGTH // 2 :]), kv.removed(blocks[: LENGTH // 2]))
        else:
            self._apply(worker, kv.stored(blocks[:7]), kv.stored(blocks[7:], parent=blocks[6]))
        self.truth.set(worker, chain, NOTHING if whole else WHOLE)

    def _all_gone(self, worker: int, *, restart: bool) -> None:
        for chain in range(CHAINS):
            self.truth.set(worker, chain, CHANGING)
        if restart:
            self.index.retire(self._slots[worker])
            self._slots[worker] = self._open(worker)
        else:
            self._apply(worker, kv.cleared())
        for chain in range(CHAINS):
            self.truth.set(worker, chain, NOTHING)

    def _fill(self) -> None:
        """Make the tables grow and shrink."""
        if len(self._fillers) > 60 or (self._fillers and self._random.random() < 0.3):
            for blocks in self._fillers[len(self._fillers) // 3 :]:
                self.index.apply([self._filler], 0, self._filler, kv.batch(kv.removed(blocks)))
            del self._fillers[len(self._fillers) // 3 :]
        self._fillers.append([self._random.randrange(1 << 40) for _ in range(200)])
        self.index.apply([self._filler], 0, self._filler, kv.batch(kv.stored(self._fillers[-1])))

    def _apply(self, worker: int, *events: object) -> None:
        counts = self.index.apply([self._slots[worker]], 0, self._slots[worker], kv.batch(*events))
        assert not counts.malformed_batch

    def _open(self, worker: int) -> int:
        self._incarnation += 1
        return self.index.open("m", False, SlotName(WorkerId(str(worker)), 0, self._incarnation).encode())


class Checker:
    """A reader that knows what it must be told."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.reader = open_reader(directory / "index", KEY)
        self._truth = Truth(directory / "truth", new=False)
        self._random = Random(seed)
        self._workers: dict[int, int] = {}
        self._generation = 0
        self.settled = 0
        self._hashes = [
            self.reader.hash_blocks(kv.prompt(names(chain)), kv.BLOCK, "m", "", []) for chain in range(CHAINS)
        ]

    def check(self) -> None:
        """Raises AssertionError for an answer that was true at no time during the question."""
        chain = self._random.randrange(CHAINS)
        before = [self._truth.get(worker, chain) for worker in range(WORKERS)]
        generation, runs = self.reader.match(self._hashes[chain])
        after = [self._truth.get(worker, chain) for worker in range(WORKERS)]
        found: dict[int, list[tuple[int, int, int, bool]]] = {}
        for slot, *run in runs:
            worker = self._worker_of(generation, slot)
            if worker is not None:
                assert stores(worker, chain), f"{worker} never had chain {chain}: {runs}"
                found.setdefault(worker, []).append((run[0], run[1], run[2], run[3]))
        for worker in range(WORKERS):
            if before[worker] != after[worker] or before[worker] % 4 == CHANGING:
                continue
            self.settled += 1
            expected = [(0, 0, LENGTH, False)] if before[worker] % 4 == WHOLE else []
            assert found.get(worker, []) == expected, f"worker {worker}, chain {chain}: {runs}"

    def _worker_of(self, generation: int, slot: int) -> int | None:
        if generation != self._generation or slot not in self._workers:
            self._generation, slots = self.reader.slots()
            named = {number: parse_slot_name(name) for number, name, _ in slots}
            self._workers = {number: int(name.worker) for number, name in named.items() if name is not None}
        return self._workers.get(slot) if generation == self._generation else None


def write(directory: Path, seed: int, lasting_s: float) -> None:
    """Be the writer, for so long; says ``ready`` when readers may come."""
    writer = Writer(directory, Truth(directory / "truth", new=not (directory / "truth").exists()), seed)
    writer.rebuild()
    print("ready", flush=True)
    end_s, steps = time.monotonic() + lasting_s, 0
    while time.monotonic() < end_s:
        writer.step()
        steps += 1
    assert writer.index.check() == ""
    print(steps, flush=True)


def read(directory: Path, seed: int, lasting_s: float) -> None:
    """Be a reader, for so long; says how often it asked and how often it knew the answer."""
    checker = Checker(directory, seed)
    end_s, asked = time.monotonic() + lasting_s, 0
    while time.monotonic() < end_s:
        checker.check()
        asked += 1
    print(asked, checker.settled, flush=True)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
