# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV caches and its shared host region as one page plan, and how many bytes a transfer of it moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpu_ops.direction import Direction
from gpu_ops.moves import Moves
from gpu_ops.plan import PagePlan, plan_from_refs

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


def plan_pages(
    kv_caches: CanonicalKVCaches,
    region: SharedOffloadRegion,
    blocks_per_chunk: int,
    *,
    canonical_layout: bool,
) -> PagePlan:
    """The plan of this worker. Takes its views from the region, tensor by tensor, as vLLM's worker does.

    Args:
        kv_caches: as the connector registers them; tensor i has one row of `page_size_bytes` per block.
        region: opened with this worker's rank (rank 0 where all ranks hold the same bytes).
        blocks_per_chunk: blocks in a row of the region.
        canonical_layout: host pages are what the refs' mappings describe, shared by all ranks; otherwise a
            chunk's row holds this worker's own pages in its own slot.
    """
    device = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors]
    if canonical_layout:
        sizes = _canonical_page_bytes(kv_caches)
        host = [region.create_next_canonical_view(size * blocks_per_chunk) for size in sizes]
    else:
        host = [
            region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk)
            for one in kv_caches.tensors
        ]
    return plan_from_refs(
        host, device, kv_caches.group_data_refs, blocks_per_chunk, canonical_layout=canonical_layout
    )


def _canonical_page_bytes(kv_caches: CanonicalKVCaches) -> list[int]:
    """Per tensor, the largest canonical page that a layer keeps there; every layer has a mapping."""
    sizes = [0] * len(kv_caches.tensors)
    for ref in (one for group in kv_caches.group_data_refs for one in group):
        sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
    return sizes


@dataclass(frozen=True, slots=True)
class _Share:
    """Bytes of one set that this rank demotes where it is their writer."""

    num_writers: int
    writer_index: int
    size_bytes: int


class ByteCount:
    """Bytes that a transfer of a plan moves on this rank."""

    def __init__(self, plan: PagePlan) -> None:
        self._shares = [_shares(plan, number) for number in range(len(plan.sets))]

    def __call__(self, moves: Moves, direction: Direction) -> int:
        """O(moves), once per number of writers that occurs in a set."""
        total_bytes = 0
        counts = np.bincount(moves[:, 2], minlength=len(self._shares)).tolist()
        for number, (count, shares) in enumerate(zip(counts, self._shares, strict=True)):
            for share in shares if count else ():
                if direction is Direction.DEMOTE and share.num_writers > 1:
                    pages = moves[moves[:, 2] == number, 0]
                    count_written = int(np.count_nonzero(pages % share.num_writers == share.writer_index))
                else:
                    count_written = count
                total_bytes += count_written * share.size_bytes
        return total_bytes


def _shares(plan: PagePlan, number: int) -> list[_Share]:
    by_writer: dict[tuple[int, int], int] = {}
    for segment in plan.sets[number]:
        writer = (segment.num_writers, segment.writer_index)
        size_bytes = segment.run.fragment_size * segment.run.num_fragments
        by_writer[writer] = by_writer.get(writer, 0) + size_bytes
    return [_Share(*writer, size_bytes) for writer, size_bytes in by_writer.items()]
