# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way from HBM to RAM: they count as such until RAM has them or their grace is over.

Time is counted in ticks, as the native core does, so that both end a grace at the same moment.
"""

from __future__ import annotations

from indexer.reference.bounds import Bounds
from indexer.reference.state import Block, Slot
from indexer.wire.vllm import EngineKey

_TICKS_PER_S = 16
_LONGEST = 1 << 14


def grace_ticks(grace_s: float) -> int:
    """Of a slot; 0 where blocks that leave HBM go nowhere."""
    return min(int(grace_s * _TICKS_PER_S + 1), _LONGEST) if grace_s > 0 else 0


class Graces:
    """Those that are running."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._running: list[tuple[int, Slot, EngineKey]] = []
        self._now = 0

    def now_is(self, now_s: float) -> None:
        """Time of the batch that is being applied."""
        self._now = int(now_s * _TICKS_PER_S)

    def begin(self, slot: Slot, key: EngineKey, block: Block) -> None:
        """A block left HBM."""
        block.demoting_until = self._now + slot.grace
        self._running.append((block.demoting_until, slot, key))

    def end(self, now_s: float) -> None:
        """End those that are over, in the order in which they end."""
        now = int(now_s * _TICKS_PER_S)
        over = sorted((grace for grace in self._running if grace[0] <= now), key=lambda grace: grace[0])
        self._running = [grace for grace in self._running if grace[0] > now]
        for until, slot, key in over:
            block = slot.blocks.get(key)
            if slot.alive and block is not None and block.demoting_until == until:
                block.demoting_until = None
                self._bounds.remember(slot, key)
