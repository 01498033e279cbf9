# SPDX-License-Identifier: Apache-2.0
"""The four fleets that a trace is replayed over, each with one more path than the one before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from engine_ext.sim.config import SimConfig
from router.replay.virtual import VirtualFleetSetup

TierSet = Literal["gpu", "cpu", "storage", "p2p"]
"""HBM alone; and host RAM; and a disk per worker; and pulls from peers."""

TIER_SETS: tuple[TierSet, ...] = get_args(TierSet)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Blocks per worker; ``storage_blocks`` 0 for a disk that never evicts, None for none on any fleet."""

    block_size_tokens: int
    hbm_blocks: int
    ram_blocks: int
    storage_blocks: int | None


def engine_config(tiers: TierSet, capacities: Capacities) -> SimConfig:
    """The engine of every worker."""
    level = TIER_SETS.index(tiers)
    return SimConfig(
        block_size_tokens=capacities.block_size_tokens,
        hbm_blocks=capacities.hbm_blocks,
        ram_blocks=capacities.ram_blocks if level >= TIER_SETS.index("cpu") else 0,
        storage_blocks=capacities.storage_blocks or 0 if level >= TIER_SETS.index("storage") else 0,
        max_model_len=capacities.block_size_tokens * capacities.hbm_blocks,
        track_identity=False,
    )


def with_tiers(setup: VirtualFleetSetup, tiers: TierSet, capacities: Capacities) -> VirtualFleetSetup:
    """The same fleet with those tiers."""
    level = TIER_SETS.index(tiers)
    return replace(
        setup,
        engine=replace(engine_config(tiers, capacities), extension=setup.engine.extension),
        endless_storage=level >= TIER_SETS.index("storage") and capacities.storage_blocks == 0,
        use_peers=level >= TIER_SETS.index("p2p"),
    )
