# SPDX-License-Identifier: Apache-2.0
"""Blocks of former weights leave vLLM's prefix cache, with the events that say so.

`BlockPool.cache_full_blocks` is where a block gets its hash, `evict_blocks` takes hashes away and leaves the block to
whoever uses it. Partial blocks (of models with states) are not noted: they stay until they are evicted.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from .former import AdapterBlocks, Weights
from .revisions import Stamp

_HELD = "_pointsman_adapter_blocks"


def note_cached_blocks(stamp_of: Any) -> None:
    """From now on every block pool of this process notes what it caches of adapters.

    `stamp_of(request)` is the request's stamp, or None.
    """
    stock = BlockPool.cache_full_blocks

    @functools.wraps(stock)
    def cache_and_note(
        self: Any,
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        *rest: Any,
        **named: Any,
    ) -> None:
        stock(self, request, blocks, num_cached_blocks, num_full_blocks, *rest, **named)
        stamp: Stamp | None = stamp_of(request)
        if stamp is not None:
            held = _held(self)
            useless = {
                block.block_id
                for block in blocks[num_cached_blocks:num_full_blocks]
                if block.block_hash is not None
                and not held.note(block.block_id, block.block_hash, stamp.weights)
            }
            if useless:
                self.evict_blocks(useless)

    BlockPool.cache_full_blocks = cache_and_note


def forget_former(pool: Any, now: Weights) -> int:
    """Takes the blocks of this adapter's former weights out of a pool's prefix cache; how many there were."""
    former = {
        block_id
        for block_id, block_hash in _held(pool).loaded(now)
        if pool.blocks[block_id].block_hash == block_hash  # not if another block has its place by now
    }
    pool.evict_blocks(former)
    return len(former)


def _held(pool: Any) -> AdapterBlocks[int, Any]:
    held: AdapterBlocks[int, Any] | None = getattr(pool, _HELD, None)
    if held is None:
        held = AdapterBlocks()
        setattr(pool, _HELD, held)
    return held
