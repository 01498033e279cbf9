# SPDX-License-Identifier: Apache-2.0
"""What a simulated worker really holds, in the terms of the index: request hash to tiers.

The hashes are computed by the plain-Python chain of ``indexer.hashing`` from the tokens of ``GET /sim/state``:
neither the native core nor any event has a part in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from indexer.hashing import HashKey, canonical_extra_keys, namespace_root, next_hash
from indexer.holders import HolderTable
from indexer.identity import Tier, WorkerId

Held = dict[int, frozenset[str]]

_TIER_NAMES = {"gpu": Tier.HBM.label, "cpu": Tier.RAM.label, "storage": Tier.STORAGE.label}


def truth(state: Mapping[str, Any], key: HashKey, model: str) -> Held:
    """Request hash to tiers of every block in a ``/sim/state``; each block's parent must be there too."""
    rows = {row["block_hash"]: row for row in state["blocks"]}
    hashes: dict[str, int] = {}

    def hash_of(name: str) -> int:
        chain = []
        while name not in hashes:
            chain.append(name)
            parent = rows[name]["parent"]
            if parent is None:
                break
            name = parent
        for one in reversed(chain):
            row = rows[one]
            parent = row["parent"]
            before = hashes[parent] if parent else namespace_root(key, model, row["lora_name"] or "")
            # The engine puts the adapter's name among the extra keys too; in our hash it is in the root only.
            extra = list(row["extra_keys"] or ())
            if extra and row["lora_name"] and extra[0] == row["lora_name"]:
                del extra[0]
            hashes[one] = next_hash(key, before, row["token_ids"], canonical_extra_keys(extra))
        return hashes[chain[0] if chain else name]

    held: Held = {}
    for name, row in rows.items():
        tiers = frozenset(_TIER_NAMES[tier] for tier in row["tiers"])
        if tiers:
            held[hash_of(name)] = held.get(hash_of(name), frozenset()) | tiers
    return held


def indexed(holders: HolderTable, worker: str) -> Held:
    """The same, as the index believes it; RAM in doubt is called ``doubtful``."""
    known = holders.workers().get(WorkerId(worker))
    if known is None:
        return {}
    slots = [known.store_slot, *(rank.slot for rank in known.ranks)]
    return _merged([block for slot in slots for block in holders.index.blocks(slot)])


def _merged(blocks: Sequence[tuple[int, int]]) -> Held:
    held: Held = {}
    for request_hash, bits in blocks:
        names = {tier.label for tier in Tier if bits >> tier & 1}
        if bits >> 3 & 1:
            names = names - {"ram"} | {"doubtful"}
        held[request_hash] = held.get(request_hash, frozenset()) | names
    return held
