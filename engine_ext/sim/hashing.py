# SPDX-License-Identifier: Apache-2.0
"""Engine block hashes: what the simulated engine calls its blocks.

``H(block) = sha256(H(parent) || token ids as little-endian u32 || 0x00 || tagged extra keys as JSON)`` with
``H(root) = sha256(seed)``. To everyone else they are opaque 32-byte names, as vLLM's are; they are chained,
so one hash names a block together with its whole prefix, its adapter and its salt.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

import msgspec

ExtraKeys = tuple[str, ...]
"""Per block, in vLLM's order: adapter name (every block), then cache salt (first block only)."""

DEFAULT_SEED = "pointsman-sim"


def root_hash(seed: str = DEFAULT_SEED) -> bytes:
    """Parent of the first block; engines that exchange blocks need the same seed."""
    return hashlib.sha256(seed.encode()).digest()


def token_array(token_ids: Sequence[int]) -> array[int]:
    """The ids as an array of u32, without a copy where they are one already."""
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        return token_ids
    return array("I", token_ids)


def block_hash(
    parent: bytes, tokens: array[int], block_index: int, lora_name: str | None, salt: Sequence[str]
) -> bytes:
    """Hash of one full block behind ``parent``; an adapter and a salt of one name are different keys."""
    data = tokens
    if sys.byteorder == "big":
        data = tokens[:]
        data.byteswap()
    keys: list[tuple[str, str]] = [("lora", lora_name)] if lora_name else []
    if block_index == 0:
        keys += [("salt", key) for key in salt]
    tail = b"\0" + msgspec.json.encode(keys) if keys else b""
    return hashlib.sha256(parent + data.tobytes() + tail).digest()


def extra_keys(block_index: int, lora_name: str | None, salt: Sequence[str]) -> ExtraKeys | None:
    """Extra keys of a request's block as events carry them, untagged; None where there are none."""
    adapter = (lora_name,) if lora_name else ()
    keys = (*adapter, *salt) if block_index == 0 else adapter
    return keys or None


def chain_hashes(
    token_ids: Sequence[int],
    block_size_tokens: int,
    root: bytes,
    *,
    lora_name: str | None = None,
    salt: Sequence[str] = (),
) -> list[bytes]:
    """Hashes of the full blocks of a prompt. O(tokens)."""
    tokens = token_array(token_ids)
    parent = root
    hashes: list[bytes] = []
    for index in range(len(tokens) // block_size_tokens):
        block = tokens[index * block_size_tokens : (index + 1) * block_size_tokens]
        parent = block_hash(parent, block, index, lora_name, salt)
        hashes.append(parent)
    return hashes


def as_int(engine_hash: bytes) -> int:
    """Low 64 bits, unsigned: how vLLM publishes a hash by default (``maybe_convert_block_hash``)."""
    return int.from_bytes(engine_hash[-8:], "big")
