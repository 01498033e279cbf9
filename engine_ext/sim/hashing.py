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
    hashes: list[bytes] = []
    extend_chain(hashes, token_array(token_ids), block_size_tokens, root, lora_name, salt)
    return hashes


def extend_chain(
    hashes: list[bytes],
    tokens: array[int],
    block_size_tokens: int,
    root: bytes,
    lora_name: str | None,
    salt: Sequence[str],
) -> None:
    """Append the hashes of the full blocks of ``tokens`` that ``hashes`` lacks. O(tokens in them)."""
    first, end = len(hashes), len(tokens) // block_size_tokens
    if first >= end:
        return
    chunk = tokens[first * block_size_tokens : end * block_size_tokens]
    if sys.byteorder == "big":
        chunk.byteswap()
    data, width = chunk.tobytes(), block_size_tokens * chunk.itemsize
    parent = hashes[-1] if hashes else root
    tail = _tail(first, lora_name, salt)
    for start in range(0, len(data), width):
        parent = hashlib.sha256(parent + data[start : start + width] + tail).digest()
        hashes.append(parent)
        if start == 0:
            tail = _tail(first + 1, lora_name, salt)


def _tail(block_index: int, lora_name: str | None, salt: Sequence[str]) -> bytes:
    """The tagged extra keys of one block: an adapter and a salt of one name are different keys."""
    keys: list[tuple[str, str]] = [("lora", lora_name)] if lora_name else []
    if block_index == 0:
        keys += [("salt", key) for key in salt]
    return b"\0" + msgspec.json.encode(keys) if keys else b""


def as_int(engine_hash: bytes) -> int:
    """Low 64 bits, unsigned: how vLLM publishes a hash by default (``maybe_convert_block_hash``)."""
    return int.from_bytes(engine_hash[-8:], "big")
