# SPDX-License-Identifier: Apache-2.0
"""The prefix index in plain dicts: the oracle of the native core, and a backend when asked for by name.

Semantics and names are those of ``native/index.hpp``; nothing here is fast.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Sequence

from indexer.errors import WireError
from indexer.hashing import HashKey, canonical_extra_keys, namespace_root, next_hash
from indexer.reference import records as slot_records
from indexer.reference.bounds import Bounds
from indexer.reference.events import EventRules
from indexer.reference.graces import Graces, grace_ticks
from indexer.reference.runs import runs
from indexer.reference.state import Counts, Slot, Totals
from indexer.wire.vllm import decode_batch


class ReferenceIndex:
    """A ``PrefixIndex`` whose queries recompute everything from the slots."""

    def __init__(
        self, key: HashKey, detached_blocks: int, unidentified_blocks: int, remembered_blocks: int
    ) -> None:
        self._key = key
        self._bounds = Bounds(detached_blocks, unidentified_blocks, remembered_blocks)
        self._graces = Graces(self._bounds)
        self._rules = EventRules(key, self._bounds, self._graces)
        self._slots: list[Slot] = []
        self._version = 0
        self._lock = threading.RLock()

    def open(self, model: str, plain: bool, name: str = "", grace_s: float = 0.0) -> int:
        with self._lock:
            self._slots.append(Slot(model, plain, grace_ticks(grace_s)))
            return len(self._slots) - 1

    def retire(self, slot: int) -> None:
        with self._lock:
            if self.alive(slot):
                self._slots[slot] = Slot("", plain=False, alive=False)
                self._version += 1

    def alive(self, slot: int) -> bool:
        return self._find(slot) is not None

    def suspect(self, slot: int, on: bool) -> None:
        """Nobody reads this index from another process."""

    def publish(self) -> None:
        """As ``suspect``."""

    def clear(self, slot: int) -> None:
        with self._lock:
            found = self._find(slot)
            if found is not None:
                found.clear()

    def apply(
        self, ranks: Sequence[int], default_rank: int, store: int, payload: bytes, now_s: float = 0.0
    ) -> Counts:
        with self._lock:
            self._graces.end(now_s)
            counts = Counts()
            try:
                batch = decode_batch(payload)
            except WireError:
                counts.malformed_batch = True
                return counts
            rank = batch.rank if batch.rank is not None and batch.rank < len(ranks) else default_rank
            slot = self._find(ranks[rank]) if rank < len(ranks) else None
            if slot is not None:
                self._graces.now_is(now_s)
                for event in batch.events:
                    self._rules.apply(slot, self._find(store), event, counts)
                self._version += 1
            return counts

    def apply_many(
        self,
        ranks: Sequence[int],
        default_rank: int,
        store: int,
        payloads: Sequence[bytes],
        now_s: float = 0.0,
    ) -> tuple[Counts, int]:
        total, malformed = Counts(), 0
        for payload in payloads:
            counts = self.apply(ranks, default_rank, store, payload, now_s)
            malformed += counts.malformed_batch
            total.add(counts)
        return total, malformed

    def hash_blocks(
        self, tokens: array[int], block_size: int, model: str, lora: str, first_block_keys: Sequence[str]
    ) -> bytes:
        if block_size < 1:
            raise ValueError("block_size must be at least 1")
        parent = namespace_root(self._key, model, lora)
        extra = canonical_extra_keys(first_block_keys)
        hashes = []
        for start in range(0, len(tokens) - block_size + 1, block_size):
            parent = next_hash(self._key, parent, tokens[start : start + block_size], extra)
            hashes.append(parent)
            extra = b""
        return struct.pack(f"<{len(hashes)}Q", *hashes)

    def match(self, hashes: bytes, now_s: float = 0.0) -> list[tuple[int, int, int, int, int]]:
        wanted = struct.unpack(f"<{len(hashes) // 8}Q", hashes)
        with self._lock:
            self._graces.end(now_s)
            held = [slot.named() for slot in self._slots]
        return runs(wanted, held)

    def counts(self, slot: int) -> Totals:
        with self._lock:
            found = self._find(slot)
            return Totals() if found is None else found.totals()

    @property
    def export_format(self) -> str:
        return slot_records.FORMAT

    def export_slot(self, slot: int) -> bytes:
        with self._lock:
            return slot_records.encode(self._find(slot) or Slot("", plain=False))

    def import_slot(self, slot: int, records: bytes, block_size: int) -> int:
        blocks = slot_records.decode(records)
        with self._lock:
            found = self._find(slot)
            if found is None or found.blocks:
                raise ValueError("records go into a live slot that holds nothing")
            found.blocks, found.block_size = blocks, block_size
            for key, block in list(blocks.items()):
                if block.request_hash is None:
                    found.unidentified_order.append(key)
                elif not block.held():
                    self._bounds.remember(found, key)
            self._bounds.bound(found, Counts())
            self._version += 1
            return len(found.blocks)

    def blocks(self, slot: int) -> list[tuple[int, int]]:
        with self._lock:
            found = self._find(slot)
            return [] if found is None else found.named()

    def sweep(self, steps: int, now_s: float = 0.0) -> bool:
        with self._lock:
            self._graces.end(now_s)
        return True

    def check(self) -> str:
        return ""

    @property
    def version(self) -> int:
        return self._version

    @property
    def distinct_blocks(self) -> int:
        with self._lock:
            return len({value for slot in self._slots for value, _ in slot.named()})

    @property
    def memory_bytes(self) -> int:
        return 0

    def _find(self, slot: int) -> Slot | None:
        """The slot, if it is alive."""
        known = 0 <= slot < len(self._slots) and self._slots[slot].alive
        return self._slots[slot] if known else None
