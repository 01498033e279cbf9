# SPDX-License-Identifier: Apache-2.0
"""Builders of KV event batches as vLLM encodes them, for tests of the indexer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

KEY_BYTES = bytes(range(16))
BLOCK = 4  # tokens per block in these tests


def stored(
    hashes: Sequence[int | bytes],
    tokens: Sequence[int] | None = None,
    parent: int | bytes | None = None,
    *,
    medium: str | None = "GPU",
    block_size: int = BLOCK,
    extra_keys: list[Any] | None = None,
    lora_name: str | None = None,
    lora_id: int | None = None,
    group: int | None = None,
    kind: str | None = None,
) -> dict[str, Any]:
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens if tokens is not None else tokens_of(hashes, block_size)),
        "block_size": block_size,
        "lora_id": lora_id,
        "medium": medium,
        "lora_name": lora_name,
    }
    optional = {"extra_keys": extra_keys, "group_idx": group, "kv_cache_spec_kind": kind}
    return event | {name: value for name, value in optional.items() if value is not None}


def placeholder(hashes: Sequence[int | bytes], medium: str = "CPU") -> dict[str, Any]:
    return stored(hashes, [], None, medium=medium, block_size=0)


def removed(
    hashes: Sequence[int | bytes], medium: str | None = "GPU", group: int | None = None
) -> dict[str, Any]:
    event: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}
    return event if group is None else event | {"group_idx": group}


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


def as_array(event: dict[str, Any]) -> list[Any]:
    """The array form of an event: the tag, then the fields by position up to the last one present."""
    names = {
        "BlockStored": [
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
            "group_idx",
            "kv_cache_spec_kind",
        ],
        "BlockRemoved": ["block_hashes", "medium", "group_idx"],
        "AllBlocksCleared": [],
    }[event["type"]]
    values = [event.get(name) for name in names]
    while values and values[-1] is None and len(values) > 2:
        values.pop()
    return [event["type"], *values]


def batch(*events: object, rank: int | None = None, ts: float = 0.0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events)] if rank is None else [ts, list(events), rank])


def tokens_of(hashes: Sequence[int | bytes], block_size: int = BLOCK) -> list[int]:
    """Token ids that follow from the block's name, so that equal names are equal blocks."""
    ids: list[int] = []
    for value in hashes:
        seed = value if isinstance(value, int) else int.from_bytes(value[:4], "big")
        ids += [(seed * 31 + i) % 50_000 for i in range(block_size)]
    return ids


def prompt(hashes: Sequence[int | bytes], block_size: int = BLOCK) -> array[int]:
    return array("I", tokens_of(hashes, block_size))
