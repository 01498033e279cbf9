# SPDX-License-Identifier: Apache-2.0
"""What ``/dump`` says of a group: per rank and tier one event with the hashes of all blocks there.

Hashes are ours, keyed, 64 bits unsigned. Each names a block with all that precedes it, so no parent is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from indexer.identity import Tier
from indexer.index import PrefixIndex
from indexer.service.registry import Place

TIER_NAMES = {Tier.HBM: "device", Tier.RAM: "host_pinned", Tier.STORAGE: "disk"}
_DOUBTFUL_BIT = 1 << 3


def dump_group(index: PrefixIndex, places: Mapping[int, Place]) -> list[dict[str, object]]:
    """Events that store what the slots hold. RAM in doubt is left out. O(blocks)."""
    events: list[dict[str, object]] = []
    for slot, place in places.items():
        held = index.blocks(slot)
        for tier, name in TIER_NAMES.items():
            hashes = sorted({value for value, bits in held if _counts(bits, tier)})
            if hashes:
                events.append(
                    {
                        "worker_id": int(place.instance),
                        "dp_rank": place.dp_rank,
                        "storage_tier": name,
                        "event": {"data": {"stored": {"block_hashes": hashes}}},
                    }
                )
    return events


def _counts(bits: int, tier: Tier) -> bool:
    return bits >> tier & 1 == 1 and not (tier is Tier.RAM and bits & _DOUBTFUL_BIT)
