# SPDX-License-Identifier: Apache-2.0
"""What `"module_path": "engine_ext.vllm.tier"` of a `secondary_tiers` entry loads: our tiers, by their names."""

from engine_ext.vllm.peers.tier import PointsmanTier
from engine_ext.vllm.storage.tier import PointsmanStorageTier

__all__ = ["PointsmanStorageTier", "PointsmanTier"]
