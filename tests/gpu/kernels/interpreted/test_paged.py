# SPDX-License-Identifier: Apache-2.0
"""Plain paged caches: layout, shard and page-length conversion against torch's own permutations."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_ops import launch
from gpu_ops.direction import Direction
from gpu_ops.errors import PlanRefused
from gpu_ops.layouts import Order, Origin, PageLayout, Placement
from gpu_ops.mover import PageMover
from gpu_ops.paged import PagedCache, as_pages, plan_paged, sequence_moves
from gpu_ops.reference import as_tokens, copy_tokens

HEADS = 4


@dataclass(frozen=True, slots=True)
class Shapes:
    """Both sides' page layouts, the device's first head, and the pages in order."""

    host: PageLayout
    device: PageLayout
    first_head: int
    host_pages: list[int]
    device_pages: list[int]


@st.composite
def shapes(draw: st.DrawFn) -> Shapes:
    short, ratio = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    lengths = draw(st.permutations([short, short * ratio]))
    head_bytes = draw(st.sampled_from([16, 32, 48, 12, 5]))
    single = draw(st.booleans())
    placements = st.just(Placement.SINGLE) if single else st.sampled_from([Placement.JOINED, Placement.SPLIT])
    heads = draw(st.sampled_from([1, 2, HEADS]))
    tokens = short * ratio * draw(st.integers(1, 3))
    host = PageLayout(lengths[0], HEADS, head_bytes, draw(st.sampled_from(Order)), draw(placements))
    device = PageLayout(lengths[1], heads, head_bytes, draw(st.sampled_from(Order)), draw(placements))
    counts = tokens // host.tokens, tokens // device.tokens
    return Shapes(
        host,
        device,
        draw(st.integers(0, HEADS // heads - 1)) * heads,
        draw(st.permutations(range(counts[0] + 1)))[: counts[0]],
        draw(st.permutations(range(counts[1] + 2)))[: counts[1]],
    )


def random_pages(pages: int, layout: PageLayout, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (pages, layout.page_bytes), dtype=torch.int8, generator=random)


def convert(one: Shapes, host: torch.Tensor, device: torch.Tensor, direction: Direction) -> None:
    """Token by token, without plans or runs."""
    for i, host_page in enumerate(one.host_pages):
        for j, device_page in enumerate(one.device_pages):
            tokens = (i * one.host.tokens, j * one.device.tokens)
            if tokens[0] + one.host.tokens <= tokens[1] or tokens[1] + one.device.tokens <= tokens[0]:
                continue
            on_host = (host[host_page], one.host, Origin(tokens[0], 0))
            on_device = (device[device_page], one.device, Origin(tokens[1], one.first_head))
            if direction is Direction.PROMOTE:
                copy_tokens(*on_host, *on_device)
            else:
                copy_tokens(*on_device, *on_host)


@pytest.mark.parametrize("direction", Direction)
@given(one=shapes())
@settings(max_examples=40)
def test_conversion_while_copying_equals_permuting_tensors(direction: Direction, one: Shapes) -> None:
    host = random_pages(len(one.host_pages) + 1, one.host, seed=1)
    device = random_pages(len(one.device_pages) + 2, one.device, seed=2)
    host_cache = PagedCache(one.host, (host.clone(),))
    device_cache = PagedCache(one.device, (device.clone(),), one.first_head)
    plan = plan_paged(host_cache, device_cache)
    moves = sequence_moves(host_cache, device_cache, one.host_pages, one.device_pages)
    launch.PageKernel(plan, programs=2).run(moves, direction)
    convert(one, host, device, direction)
    assert torch.equal(plan.host[0], host)
    assert torch.equal(plan.device[0], device)


def test_what_two_shards_demote_is_promoted_into_a_full_page() -> None:
    """From tensor parallelism of two to one: each rank writes its heads of the canonical page."""
    canonical = PageLayout(16, 4, 32, Order.HND)
    shard = PageLayout(8, 2, 32)
    full = PageLayout(16, 4, 32, placement=Placement.JOINED)
    host = PagedCache(canonical, (torch.zeros((3, canonical.page_bytes), dtype=torch.int8),))
    for rank in range(2):
        rank_pages = PagedCache(shard, (random_pages(4, shard, seed=rank),), first_head=2 * rank)
        mover = PageMover(plan_paged(host, rank_pages))
        mover.demote(sequence_moves(host, rank_pages, [2, 0], [3, 1, 0, 2]))
    cache = PagedCache(full, (random_pages(2, full, seed=9),))
    PageMover(plan_paged(host, cache)).promote(sequence_moves(host, cache, [2, 0], [1, 0]))
    for first_head, rank in ((0, 0), (2, 1)):
        pages = random_pages(4, shard, seed=rank)
        blocks = torch.cat([as_tokens(pages[page], shard) for page in (3, 1, 0, 2)])
        promoted = torch.cat([as_tokens(cache.tensors[0][page], full) for page in (1, 0)])
        assert torch.equal(promoted[:, first_head : first_head + 2], blocks)


def test_a_cache_of_any_type_and_dimension_order_is_pages() -> None:
    """vLLM's HND caches: listed (blocks, 2, tokens, heads, size), stored with heads before tokens."""
    stored = torch.arange(3 * 2 * 4 * 5 * 6, dtype=torch.float32).reshape(3, 2, 4, 5, 6).to(torch.bfloat16)
    cache = stored.permute(0, 1, 3, 2, 4)
    pages = as_pages(cache[1:])
    assert pages.data_ptr() == cache[1].data_ptr()
    assert torch.equal(pages, stored[1:].reshape(2, -1).view(torch.int8))


def test_caches_that_cannot_be_pages_are_refused() -> None:
    with pytest.raises(PlanRefused, match="gaps"):
        as_pages(torch.zeros(3, 4, 6)[:, :, :5])
    layout = PageLayout(16, 2, 32)
    pages = PagedCache(layout, (random_pages(2, layout, seed=1),))
    other = PageLayout(24, 2, 32)
    with pytest.raises(PlanRefused, match="not made of"):
        plan_paged(pages, PagedCache(other, (random_pages(2, other, seed=1),)))
    with pytest.raises(PlanRefused, match="are not"):
        plan_paged(pages, PagedCache(layout, (torch.zeros((2, 64), dtype=torch.int8),)))
    with pytest.raises(PlanRefused, match="tensors"):
        plan_paged(pages, PagedCache(layout, ()))
    with pytest.raises(PlanRefused, match="do not hold"):
        sequence_moves(pages, pages, [0, 1], [0])
