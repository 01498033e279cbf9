# SPDX-License-Identifier: Apache-2.0
"""How much a slot keeps of what waits: for its parent, for its identity, for its next holder."""

from __future__ import annotations

from indexer.identity import Tier
from indexer.reference.state import Block, Counts, Slot
from indexer.wire.vllm import EngineKey


class Bounds:
    """Limits in blocks per slot (``indexer.index.IndexLimits``)."""

    def __init__(self, detached_blocks: int, unidentified_blocks: int, remembered_blocks: int) -> None:
        self._detached_blocks = detached_blocks
        self._unidentified_blocks = unidentified_blocks
        self._remembered_blocks = remembered_blocks

    def release(self, slot: Slot, key: EngineKey, block: Block) -> None:
        """The last reference went: the identity is remembered, if there is one."""
        if block.request_hash is None:
            del slot.blocks[key]
        else:
            self.remember(slot, key)

    def remember(self, slot: Slot, key: EngineKey) -> None:
        """Keep the identity of a block that nobody holds, for a while."""
        slot.remembered_order.append(key)
        while len(slot.remembered_order) > self._remembered_blocks:
            oldest = slot.remembered_order.popleft()
            block = slot.blocks.get(oldest)
            if block is None or block.request_hash is None or block.demoting_until is not None:
                continue
            if not block.held():
                del slot.blocks[oldest]

    def bound(self, slot: Slot, counts: Counts) -> None:
        """Give up what has waited longest."""
        while slot.detached_blocks() > self._detached_blocks:
            _, oldest = slot.detached.popitem(last=False)
            counts.dropped_waiting += len(oldest.keys)
            for key in oldest.keys:
                block = slot.blocks.get(key)
                if block is not None and block.request_hash is None:
                    block.references[Tier.HBM] = 0
                    if not block.held():
                        del slot.blocks[key]
        while len(slot.unidentified_order) > self._unidentified_blocks:
            key = slot.unidentified_order.popleft()
            block = slot.blocks.get(key)
            if block is not None and block.request_hash is None and not block.references[Tier.HBM]:
                del slot.blocks[key]
                counts.dropped_waiting += 1
