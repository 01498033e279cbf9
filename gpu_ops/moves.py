# SPDX-License-Identifier: Apache-2.0
"""Moves: which pages a transfer moves. An int32 array (n, 3) of rows (host page, device page, set).

Rows are independent: their order means nothing, and no two rows of a promotion may name the same device page and set
(of a demotion: the same host page and set), as nothing orders them.

NumPy and not torch: a small transfer is over in tens of microseconds, and an operation on a small torch tensor takes
two or three of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import PlanRefused
from .plan import PagePlan

Moves: TypeAlias = npt.NDArray[np.int32]
Ids: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


def page_moves(host_pages: Ids, device_pages: Ids, in_set: Ids | int = 0) -> Moves:
    """Row i moves between host_pages[i] and device_pages[i]."""
    moves = np.empty((len(host_pages), 3), dtype=np.int32)
    if len(device_pages) != len(moves):
        raise PlanRefused(f"{len(moves)} host pages for {len(device_pages)} device pages")
    moves[:, 0], moves[:, 1], moves[:, 2] = host_pages, device_pages, in_set
    return moves


def block_moves(
    host_chunks: Ids,
    device_blocks: Ids,
    group_sizes: Sequence[int],
    first_blocks: Sequence[int],
    pages_per_chunk: int,
) -> Moves:
    """The moves of a vLLM transfer, from its two specs. O(blocks).

    A group's device blocks are consecutive blocks of its request, from number first_blocks[group] on; its chunks
    cover them, and the first chunk may begin before the first block, the last end behind the last one
    (`vllm/v1/kv_offload/base.py`, GPULoadStoreSpec; `cpu/gpu_worker.py`, transfer_async).

    Args:
        host_chunks: CPULoadStoreSpec.block_ids.
        device_blocks: GPULoadStoreSpec.block_ids.
        group_sizes: GPULoadStoreSpec.group_sizes.
        first_blocks: GPULoadStoreSpec.block_indices.
        pages_per_chunk: vLLM's blocks_per_chunk.

    Raises PlanRefused where the groups do not use up both lists exactly.
    """
    chunks, blocks = np.asarray(host_chunks), np.asarray(device_blocks)
    moves = np.empty((len(blocks), 3), dtype=np.int32)
    next_chunk = next_block = 0
    for group, (size, first) in enumerate(zip(group_sizes, first_blocks, strict=True)):
        skipped = first % pages_per_chunk
        used = -(-(skipped + size) // pages_per_chunk) if size else 0
        of_group = chunks[next_chunk : next_chunk + used]
        rows = moves[next_block : next_block + size]
        if len(of_group) < used or len(rows) < size:
            raise PlanRefused(f"group {group} needs {used} chunks and {size} blocks, fewer are left")
        rows[:, 0] = _pages(of_group, pages_per_chunk)[skipped : skipped + size]
        rows[:, 2] = group
        next_chunk, next_block = next_chunk + used, next_block + size
    if (next_chunk, next_block) != (len(chunks), len(blocks)):
        raise PlanRefused(
            f"groups of {list(group_sizes)} blocks leave {len(chunks) - next_chunk} chunks "
            f"and {len(blocks) - next_block} blocks over"
        )
    moves[:, 1] = blocks
    return moves


def _pages(chunks: npt.NDArray[np.integer], pages_per_chunk: int) -> npt.NDArray[np.integer]:
    """All pages of these chunks, in order."""
    if pages_per_chunk == 1:
        return chunks
    return (chunks[:, None] * pages_per_chunk + np.arange(pages_per_chunk)).reshape(-1)


def check_moves(plan: PagePlan, moves: Moves) -> None:
    """Raises PlanRefused unless every row names pages and a set of the plan. O(moves)."""
    if not isinstance(moves, np.ndarray) or moves.dtype != np.int32 or moves.ndim != 2 or moves.shape[1] != 3:
        raise PlanRefused(f"moves are an int32 array (n, 3), not {moves!r}")
    if not len(moves):
        return
    limits = {"host page": plan.num_host_pages, "device page": plan.num_device_pages, "set": len(plan.sets)}
    bounds = zip(moves.min(axis=0).tolist(), moves.max(axis=0).tolist(), limits.items(), strict=True)
    for low, high, (what, limit) in bounds:
        if low < 0 or high >= limit:
            raise PlanRefused(f"{what} {low if low < 0 else high} of a plan with {limit}")
