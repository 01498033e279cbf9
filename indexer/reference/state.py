# SPDX-License-Identifier: Apache-2.0
"""What the reference keeps of a slot, and the counts that it answers with. Data only."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field, fields

from indexer.identity import Tier
from indexer.wire.vllm import EngineKey, Stored

DOUBTFUL_BIT = 1 << 3
DEMOTING_BIT = 1 << 4


@dataclass(slots=True)
class Counts:
    """What one batch did (``indexer.index.ApplyCounts``)."""

    stored: int = 0
    removed: int = 0
    clears: int = 0
    detached: int = 0
    joined: int = 0
    unidentified: int = 0
    unknown_removals: int = 0
    dropped_waiting: int = 0
    conflicts: int = 0
    malformed_events: int = 0
    unknown_events: int = 0
    unknown_medium_events: int = 0
    sparse_events: int = 0
    evicted: int = 0
    """Always 0: this index has no bound of its own."""
    malformed_batch: bool = False

    def add(self, other: Counts) -> None:
        """Add another batch's; malformed where either is."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
        self.malformed_batch = bool(self.malformed_batch)


@dataclass(frozen=True, slots=True)
class Totals:
    """What a slot holds (``indexer.index.SlotCounts``)."""

    hbm: int = 0
    ram: int = 0
    storage: int = 0
    doubtful_ram: int = 0
    unidentified: int = 0
    detached: int = 0
    remembered: int = 0
    demoting: int = 0
    block_size: int = 0


@dataclass(slots=True)
class Block:
    request_hash: int | None = None
    references: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    doubtful_ram: bool = False
    demoting_until: int | None = None

    def held(self) -> bool:
        return any(self.references.values())

    def bits(self) -> int:
        """A bit per tier, and those of doubt."""
        bits = sum(1 << tier for tier in Tier if self.references[tier])
        bits |= DOUBTFUL_BIT if self.doubtful_ram else 0
        return bits | DEMOTING_BIT if self.demoting_until is not None else bits


@dataclass(slots=True)
class Slot:
    model: str
    plain: bool
    grace: int = 0
    alive: bool = True
    block_size: int = 0
    blocks: dict[EngineKey, Block] = field(default_factory=dict)
    detached: OrderedDict[int, Stored] = field(default_factory=OrderedDict)
    next_detached: int = 0
    unidentified_order: deque[EngineKey] = field(default_factory=deque)
    remembered_order: deque[EngineKey] = field(default_factory=deque)

    def detached_blocks(self) -> int:
        return sum(len(event.keys) for event in self.detached.values())

    def named(self) -> list[tuple[int, int]]:
        """(request hash, bits) of every identified block that is held or on its way to RAM."""
        return [
            (block.request_hash, block.bits())
            for block in self.blocks.values()
            if block.request_hash is not None and (block.held() or block.demoting_until is not None)
        ]

    def totals(self) -> Totals:
        """What it holds. O(blocks)."""
        named = [block for block in self.blocks.values() if block.request_hash is not None]
        return Totals(
            hbm=sum(block.references[Tier.HBM] > 0 for block in named),
            ram=sum(block.references[Tier.RAM] > 0 for block in named),
            storage=sum(block.references[Tier.STORAGE] > 0 for block in named),
            doubtful_ram=sum(block.doubtful_ram for block in named),
            unidentified=len(self.blocks) - len(named),
            detached=self.detached_blocks(),
            remembered=sum(not block.held() and block.demoting_until is None for block in named),
            demoting=sum(block.demoting_until is not None for block in named),
            block_size=self.block_size,
        )

    def clear(self) -> None:
        """As the engine's clear-all: HBM is empty, RAM doubtful."""
        released = []
        for key, block in self.blocks.items():
            if block.references[Tier.HBM] or block.demoting_until is not None:
                block.references[Tier.HBM] = 0
                block.demoting_until = None
                if not block.held():
                    released.append(key)
            block.doubtful_ram = block.references[Tier.RAM] > 0
        for key in released:
            del self.blocks[key]
        self.detached.clear()
