# SPDX-License-Identifier: Apache-2.0
"""A slot as bytes and back, for snapshots."""

from __future__ import annotations

import msgspec

from indexer.identity import Tier
from indexer.reference.state import Block, Slot
from indexer.wire.vllm import EngineKey

FORMAT = "reference-1"


def encode(slot: Slot) -> bytes:
    """Every block with its references. O(blocks)."""
    return msgspec.msgpack.encode(
        [
            (*key, block.request_hash, [*block.references.values()], block.doubtful_ram)
            for key, block in slot.blocks.items()
        ]
    )


def decode(records: bytes) -> dict[EngineKey, Block]:
    """The blocks of an encoded slot.

    Raises:
        ValueError: it is none, or has a block that no slot could have.
    """
    try:
        rows = msgspec.msgpack.decode(
            records, type=list[tuple[int, int | bytes, int | None, tuple[int, int, int], bool]]
        )
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(str(error)) from error
    found: dict[EngineKey, Block] = {}
    for group, name, value, counts, doubtful in rows:
        block = Block(value, dict(zip(Tier, counts, strict=True)), doubtful)
        possible = (value is not None or block.held()) and (not doubtful or counts[Tier.RAM] > 0)
        if (group, name) in found or not possible:
            raise ValueError("a record is none that a slot could have")
        found[group, name] = block
    return found
