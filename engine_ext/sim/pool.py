# SPDX-License-Identifier: Apache-2.0
"""The paged HBM pool: numbered blocks, reference counts, prefix lookup, and eviction through one free queue.

Same rules as vLLM's ``v1/core/block_pool.py`` (0.32): a free block keeps its contents until it is handed out
again, and only then is it evicted; cached blocks are appended to the free queue with a request's tail first,
blocks that were never full are reused first; one hash may have several copies, each announced and removed by
itself. Block 0 is vLLM's null block, so ``num_blocks`` gives one usable block less. All operations are O(1)
per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class HbmPool:
    """Blocks of one engine's HBM. Holds no tokens: the caller knows what a hash stands for."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks {num_blocks} must be at least 2 (block 0 is the null block)")
        self.usable_blocks = num_blocks - 1
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._block_of: dict[bytes, int] = {}
        """The oldest copy of each hash."""
        self._copies_of: dict[bytes, list[int]] = {}
        """The further ones; most hashes have none."""

    @property
    def free_blocks(self) -> int:
        """Blocks no request refers to, cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use by requests, 0 to 1 (``vllm:kv_cache_usage_perc``)."""
        return 1.0 - len(self._free) / self.usable_blocks

    def hashes(self) -> dict[bytes, int]:
        """Every cached hash and its number of copies."""
        return {one: 1 + len(self._copies_of.get(one, ())) for one in self._block_of}

    def holds(self, engine_hash: bytes) -> bool:
        """Whether any copy is cached."""
        return engine_hash in self._block_of

    def match(self, hashes: Sequence[bytes], limit_blocks: int) -> list[int]:
        """Blocks of the longest cached prefix, at most ``limit_blocks``. Changes nothing."""
        found: list[int] = []
        for engine_hash in hashes[:limit_blocks]:
            block = self._block_of.get(engine_hash)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks would leave the free queue when touched."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def touch(self, blocks: Sequence[int]) -> None:
        """Refer to cached blocks once more."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def take(self, count: int) -> tuple[list[int], list[bytes]]:
        """``count`` fresh blocks, and the hashes evicted to get them, in order.

        Raises:
            ValueError: fewer than ``count`` blocks are free.
        """
        if count > len(self._free):
            raise ValueError(f"cannot take {count} of {len(self._free)} free blocks")
        taken: list[int] = []
        evicted: list[bytes] = []
        pop, hash_of, references = self._free.popitem, self._hash_of, self._references
        for _ in range(count):
            block, _none = pop(last=False)
            engine_hash = hash_of[block]
            if engine_hash is not None:
                self._forget(block, engine_hash)
                evicted.append(engine_hash)
            references[block] = 1
            taken.append(block)
        return taken, evicted

    def cache(self, block: int, engine_hash: bytes) -> None:
        """A block in use has become full: it can be found by ``engine_hash`` from now on."""
        self._hash_of[block] = engine_hash
        if self._block_of.setdefault(engine_hash, block) != block:
            self._copies_of.setdefault(engine_hash, []).append(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference each; ``blocks`` in the order in which they should be evicted."""
        unhashed: list[int] = []
        for block in blocks:
            self._references[block] -= 1
            if self._references[block]:
                continue
            self._free[block] = None
            if self._hash_of[block] is None:
                unhashed.append(block)
        for block in reversed(unhashed):
            self._free.move_to_end(block, last=False)

    def clear(self) -> bool:
        """Forget every hash; refused (False) while a request holds a block."""
        if len(self._free) != self.usable_blocks:
            return False
        self._block_of.clear()
        self._copies_of.clear()
        self._hash_of = [None] * len(self._hash_of)
        return True

    def _forget(self, block: int, engine_hash: bytes) -> None:
        self._hash_of[block] = None
        copies = self._copies_of.get(engine_hash)
        if copies is None:
            del self._block_of[engine_hash]
            return
        if self._block_of[engine_hash] == block:
            self._block_of[engine_hash] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies_of[engine_hash]
