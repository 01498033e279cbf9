# SPDX-License-Identifier: Apache-2.0
"""Names of things in the index: tiers, holders, namespaces.

* A *holder* is one data-parallel rank of one incarnation of a worker; HBM and RAM belong to it.
* A *store* is a storage root that outlives workers and that several of them may read.
* A *namespace* is what makes equal token ids different blocks before any block is hashed: the base
  model and the LoRA adapter.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

WorkerId = NewType("WorkerId", str)


class Tier(enum.IntEnum):
    """Where a block lies, nearest to the GPU first. The numbers are those of the native core."""

    HBM = 0
    RAM = 1
    STORAGE = 2

    @property
    def label(self) -> str:
        """The lower-case name used in records, metrics and headers."""
        return self.name.lower()


# Spellings seen in vLLM events and connectors (vllm/distributed/kv_events.py, v1/kv_offload, LMCache).
# A missing medium means the GPU: old engines only published GPU events.
MEDIUM_TIERS: dict[str, Tier] = {
    "gpu": Tier.HBM,
    "hbm": Tier.HBM,
    "cpu": Tier.RAM,
    "cpu_pinned": Tier.RAM,
    "host": Tier.RAM,
    "storage": Tier.STORAGE,
    "disk": Tier.STORAGE,
    "fs": Tier.STORAGE,
    "obj": Tier.STORAGE,
}


def tier_of_medium(medium: str | None) -> Tier | None:
    """Tier of a medium string; None for a spelling we do not know (never guessed to be HBM)."""
    if medium is None:
        return Tier.HBM
    return MEDIUM_TIERS.get(medium.lower())


@dataclass(frozen=True, slots=True)
class Namespace:
    """Base model and LoRA adapter (None: the base model itself)."""

    model: str
    lora: str | None = None


@dataclass(frozen=True, slots=True, order=True)
class WorkerRank:
    """A data-parallel rank of a worker: the unit that owns a cache."""

    worker: WorkerId
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """One incarnation of a worker's rank. A restart makes a new holder; nothing of the old one counts."""

    rank: WorkerRank
    incarnation: int


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks ``[start, end)`` of a request, all held by one slot of the index on one tier."""

    slot: int
    tier: Tier
    start: int
    end: int
    doubtful: bool = False
    """Not to be relied upon: RAM of a rank that cleared its cache, or demoting."""
    demoting: bool = False
    """Gone from HBM, expected in RAM."""
