# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own workers copy and what we copy, from the same refs and the same transfer specs.

Mappings, copy plans, descriptors and skipping are vLLM's own code (worker.py says what is not).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, CanonicalKVCacheRef, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu import gpu_worker

from gpu_ops.descriptors import fragment_tables, unroll
from gpu_ops.direction import Direction
from gpu_ops.layouts import Order, Origin, PageLayout, Placement, copy_runs
from gpu_ops.mover import DescriptorCopy, PageMover
from gpu_ops.moves import Moves, block_moves
from gpu_ops.plan import plan_from_refs

from .worker import NO_PLATFORM, handler

HEAD_SIZE, BLOCK_TOKENS, BLOCKS, CHUNKS = 8, 4, 12, 6


def kv_cache(order: Order, placement: Placement, heads: int, blocks: int, seed: int) -> torch.Tensor:
    """A cache as vLLM 0.32 allocates it: listed in one shape, stored in either order of token and head."""
    random = torch.Generator().manual_seed(seed)

    def stored(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=random).view(torch.bfloat16)

    if placement is Placement.JOINED:
        if order is Order.HND:
            return stored(blocks, heads, BLOCK_TOKENS, 2 * HEAD_SIZE)
        return stored(blocks, BLOCK_TOKENS, heads, 2 * HEAD_SIZE).transpose(1, 2)
    if order is Order.NHD:
        return stored(blocks, 2, BLOCK_TOKENS, heads, HEAD_SIZE)
    return stored(blocks, 2, heads, BLOCK_TOKENS, HEAD_SIZE).transpose(2, 3)


def mapping(cache: torch.Tensor, heads: int, total_heads: int, tp_size: int, rank: int) -> Any:
    """The canonical mapping that vLLM certifies for this cache on this rank."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    context = canonical_mapping._RankContext(
        tp_size=tp_size, dcp_size=1, pcp_size=1, interleave=1, total_kv_heads=total_heads, rank=rank
    )
    found = canonical_mapping._layer_mapping(spec, cache, cache.shape[0], context)
    assert found is not None, "vLLM recognises its own layout"
    return found


def bytes_of(runs: Any) -> list[tuple[int, int]]:
    return sorted(
        (
            run.local_offset + i * run.local_stride + byte,
            run.canonical_offset + i * run.canonical_stride + byte,
        )
        for run in runs
        for i in range(run.num_fragments)
        for byte in range(run.fragment_size)
    )


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("placement", [Placement.JOINED, Placement.SPLIT])
@pytest.mark.parametrize(("total_heads", "tp_size"), [(4, 1), (4, 2), (4, 4), (2, 4)])
def test_our_layouts_are_vllm_s_canonical_layouts(
    order: Order, placement: Placement, total_heads: int, tp_size: int
) -> None:
    heads = max(1, total_heads // tp_size)
    local = PageLayout(BLOCK_TOKENS, heads, HEAD_SIZE * 2, order, placement)
    canonical = PageLayout(BLOCK_TOKENS, total_heads, HEAD_SIZE * 2, order, placement)
    for rank in range(tp_size):
        theirs = mapping(kv_cache(order, placement, heads, 2, 0), heads, total_heads, tp_size, rank)
        first_head = rank * heads * total_heads // max(total_heads, tp_size)
        ours = copy_runs(local, canonical, Origin(head=first_head), Origin())
        assert theirs.canonical_page_size_bytes == canonical.page_bytes
        assert bytes_of(ours) == bytes_of(theirs.runs)
        assert len(ours) <= len(theirs.runs)


class Transfer:
    """Two layers in two groups on one rank, with memory of their own, and the specs of one transfer."""

    def __init__(self, data: st.DataObject, *, canonical_layout: bool) -> None:
        draw = data.draw
        total_heads, tp_size = draw(st.sampled_from([(4, 1), (4, 2), (2, 4)]))
        heads = max(1, total_heads // tp_size)
        rank = draw(st.integers(0, tp_size - 1))
        self.canonical_layout = canonical_layout
        pages_per_chunk = draw(st.integers(1, 3))
        device, host = [], []
        self.refs: list[list[CanonicalKVCacheRef]] = []
        for layer in range(2):
            layout = draw(st.sampled_from(Order)), draw(st.sampled_from([Placement.JOINED, Placement.SPLIT]))
            cache = kv_cache(*layout, heads, BLOCKS, seed=layer)
            known = mapping(cache, heads, total_heads, tp_size, rank)
            page_bytes = known.local_page_size_bytes
            pages = torch.tensor([], dtype=torch.int8)
            device.append(pages.set_(cache.untyped_storage(), 0, (BLOCKS, page_bytes), (page_bytes, 1)))
            host_page = known.canonical_page_size_bytes if canonical_layout else page_bytes
            row = host_page * pages_per_chunk
            region = torch.randint(-128, 128, (CHUNKS, row + 64), dtype=torch.int8)
            host.append(region[:, 32 : 32 + row])
            self.refs.append([CanonicalKVCacheRef(layer, page_bytes, known)])
        self.plan = plan_from_refs(
            host, device, self.refs, pages_per_chunk, canonical_layout=canonical_layout
        )
        self.group_sizes = [draw(st.integers(0, 5)) for _ in range(2)]
        self.first_blocks = [draw(st.integers(0, 5)) for _ in range(2)]
        blocks = draw(st.permutations(range(BLOCKS)))[: sum(self.group_sizes)]
        chunks: list[int] = []
        for size, first in zip(self.group_sizes, self.first_blocks, strict=True):
            used = -(-(first % pages_per_chunk + size) // pages_per_chunk) if size else 0
            chunks += draw(st.permutations(range(CHUNKS)))[:used]
        self.gpu_spec = GPULoadStoreSpec(blocks, self.group_sizes, self.first_blocks)
        self.cpu_spec = ChunkSpec(chunks)

    def run(self, direction: Direction, copy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The transfer by vLLM's handler, its descriptors handed to `copy`."""
        one = handler(self.plan, self.refs, direction, copy, canonical_layout=self.canonical_layout)
        specs = (self.cpu_spec, self.gpu_spec)
        with monkeypatch.context() as patched:
            patched.setattr(gpu_worker, "current_platform", NO_PLATFORM)
            assert one.transfer_async(1, *(specs if direction is Direction.PROMOTE else specs[::-1]))

    def moves(self) -> Moves:
        return block_moves(
            self.cpu_spec.block_ids,
            self.gpu_spec.block_ids,
            self.group_sizes,
            self.first_blocks,
            self.plan.pages_per_chunk,
        )


class ChunkSpec(BlockIDsLoadStoreSpec):
    """vLLM's CPULoadStoreSpec without its module's imports."""


BOTH = pytest.mark.parametrize("direction", Direction)
LAYOUTS = pytest.mark.parametrize("canonical_layout", [False, True], ids=["direct", "canonical"])


@BOTH
@LAYOUTS
@given(data=st.data())
@settings(max_examples=40)
def test_our_descriptors_are_those_of_vllm_s_worker(
    direction: Direction, canonical_layout: bool, data: st.DataObject
) -> None:
    transfer = Transfer(data, canonical_layout=canonical_layout)
    theirs: list[tuple[int, int, int]] = []

    def record(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, **_: bool) -> None:
        theirs.extend(zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True))

    with pytest.MonkeyPatch.context() as monkeypatch:
        transfer.run(direction, record, monkeypatch)
    flat = unroll(transfer.plan, fragment_tables(transfer.plan), transfer.moves(), direction)
    ours = list(zip(flat.sources.tolist(), flat.targets.tolist(), flat.sizes.tolist(), strict=True))
    assert sorted(ours) == sorted(theirs)


@BOTH
@LAYOUTS
@given(data=st.data())
@settings(max_examples=20)
def test_our_copies_in_vllm_s_worker_move_what_our_mover_moves(
    direction: Direction, canonical_layout: bool, data: st.DataObject
) -> None:
    transfer = Transfer(data, canonical_layout=canonical_layout)
    targets = transfer.plan.device if direction is Direction.PROMOTE else transfer.plan.host
    before = [target.clone() for target in targets]
    copy = DescriptorCopy(direction, torch.device("cpu"), host_is_pinned=False)
    with pytest.MonkeyPatch.context() as monkeypatch:
        transfer.run(direction, copy, monkeypatch)
    by_vllm = [target.clone() for target in targets]
    for target, old in zip(targets, before, strict=True):
        target.copy_(old)
    mover = PageMover(transfer.plan)
    mover.promote(transfer.moves()) if direction is Direction.PROMOTE else mover.demote(transfer.moves())
    assert all(torch.equal(a, b) for a, b in zip(targets, by_vllm, strict=True))


def test_blocks_that_do_not_fill_their_chunks_are_refused() -> None:
    from gpu_ops.errors import PlanRefused

    with pytest.raises(PlanRefused, match="fewer are left"):
        block_moves([0], [1, 2, 3], [3], [1], 2)
    with pytest.raises(PlanRefused, match="over"):
        block_moves([0, 1, 2], [1, 2], [2], [0], 2)
    assert block_moves([], [], [0], [0], 2).shape == (0, 3)
