# SPDX-License-Identifier: Apache-2.0
"""The tiers below HBM: pinned host RAM (LRU, pinnable) and storage (LRU, may be shared).

RAM follows vLLM's ``CPUOffloadingManager`` (0.32): a store first makes room, all or nothing, never at the cost
of blocks it was itself asked to keep; a block being written is known but not readable; a block being read
cannot be evicted. Operations are O(1) per block, eviction O(1) per victim plus the pinned blocks it passes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

_WRITING = -1


class RamTier:
    """Host RAM of one engine, in blocks."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._readers: OrderedDict[bytes, int] = OrderedDict()
        """Hash to readers, least recently used first; ``_WRITING`` while its store is under way."""

    def __len__(self) -> int:
        return len(self._readers)

    def known(self, engine_hash: bytes) -> bool:
        """Held, or being written."""
        return engine_hash in self._readers

    def ready(self, engine_hash: bytes) -> bool:
        """Held and readable."""
        return self._readers.get(engine_hash, _WRITING) != _WRITING

    def ready_hashes(self) -> list[bytes]:
        """Every readable block."""
        return [h for h, readers in self._readers.items() if readers != _WRITING]

    def prepare(
        self, keys: Sequence[bytes], keep: AbstractSet[bytes] = frozenset()
    ) -> tuple[list[bytes], list[bytes]] | None:
        """Make room for those of ``keys`` that are absent and mark them as being written.

        Neither ``keys`` nor ``keep`` are evicted for it.

        Returns:
            The keys to write and the keys evicted for them; None when there is no room.
        """
        wanted = [key for key in keys if key not in self._readers]
        excess = len(self._readers) + len(wanted) - self.capacity_blocks
        victims: list[bytes] = []
        if excess > 0:
            protected = {*keys}
            for key, readers in self._readers.items():
                if readers == 0 and key not in protected and key not in keep:
                    victims.append(key)
                    if len(victims) == excess:
                        break
            if len(victims) < excess:
                return None
        for key in victims:
            del self._readers[key]
        for key in wanted:
            self._readers[key] = _WRITING
        return wanted, victims

    def complete(self, keys: Iterable[bytes]) -> list[bytes]:
        """Writes are over; returns those that became readable (a cleared tier has forgotten them)."""
        written = [key for key in keys if self._readers.get(key) == _WRITING]
        for key in written:
            self._readers[key] = 0
        return written

    def abandon(self, keys: Iterable[bytes]) -> list[bytes]:
        """Writes will not be finished; returns the keys forgotten."""
        unwritten = [key for key in keys if self._readers.get(key) == _WRITING]
        for key in unwritten:
            del self._readers[key]
        return unwritten

    def pin(self, keys: Iterable[bytes]) -> None:
        """Reading begins: the blocks cannot be evicted until ``unpin``."""
        for key in keys:
            self._readers[key] += 1

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Reading is over."""
        for key in keys:
            if self._readers.get(key, 0) > 0:
                self._readers[key] -= 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """Used just now; the tail of the chain becomes the first of them to be evicted."""
        for key in reversed(keys):
            if key in self._readers:
                self._readers.move_to_end(key)

    def clear(self) -> None:
        """Forget everything."""
        self._readers.clear()


class StorageTier:
    """Blocks on disk. Pass one object to several engines to model a shared file system."""

    def __init__(self, capacity_blocks: int | None = None) -> None:
        self.capacity_blocks = capacity_blocks
        """None for no bound: vLLM's own ``fs`` tier never evicts."""
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, engine_hash: bytes) -> bool:
        return engine_hash in self._held

    def hashes(self) -> list[bytes]:
        """Every block held."""
        return list(self._held)

    def store(self, keys: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Write the absent ones; returns the keys written and the keys evicted."""
        written = [key for key in keys if key not in self._held]
        for key in written:
            self._held[key] = None
        evicted: list[bytes] = []
        while self.capacity_blocks is not None and len(self._held) > self.capacity_blocks:
            evicted.append(self._held.popitem(last=False)[0])
        return written, evicted

    def touch(self, keys: Iterable[bytes]) -> None:
        """Used just now."""
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)
