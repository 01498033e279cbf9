# SPDX-License-Identifier: Apache-2.0
"""A front for plain paged caches: tensors and a layout on each side, no vLLM.

    host = PagedCache(PageLayout(tokens=32, heads=8, head_bytes=256, order=Order.HND), (pinned,))
    device = PagedCache(PageLayout(tokens=16, heads=2, head_bytes=256), (cache,), first_head=4)
    mover = PageMover(plan_paged(host, device))
    mover.promote(sequence_moves(host, device, [7, 3], [10, 11, 40, 2]))

converts while it copies: HND to NHD, eight heads to this rank's two, pages of 32 tokens to blocks of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .errors import PlanRefused
from .layouts import Origin, PageLayout, copy_runs
from .moves import Ids, Moves, page_moves
from .plan import PagePlan, Segment


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """Tensors whose first dimension counts pages, all of one layout (one per layer, or per layer and K or V).

    Any dtype; a page must be dense, though its dimensions may be stored in another order than they are listed.
    `first_head` is the number, among all heads of the model, of the first one that these tensors hold.
    """

    layout: PageLayout
    tensors: tuple[torch.Tensor, ...]
    first_head: int = 0


def as_pages(cache: torch.Tensor) -> torch.Tensor:
    """The cache's memory as int8 (pages, page bytes), without a copy. Raises PlanRefused if a page is not dense."""
    dimensions = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
    dense = 1
    for stride, length in dimensions:
        if length > 1 and stride != dense:
            raise PlanRefused(
                f"pages of shape {tuple(cache.shape[1:])} and strides {cache.stride()[1:]} have gaps"
            )
        dense *= length
    size = cache.element_size()
    flat = torch.empty(0, dtype=torch.int8, device=cache.device)
    return flat.set_(
        cache.untyped_storage(),
        cache.storage_offset() * size,
        (cache.shape[0], dense * size),
        (cache.stride(0) * size, 1),
    )


def plan_paged(host: PagedCache, device: PagedCache) -> PagePlan:
    """A plan between two caches; tensor i belongs to tensor i. Its sets are the positions of the smaller page.

    Raises PlanRefused where a page is not of its layout's size, one page length does not divide the other, or the
    caches have no head in common.
    """
    small, large = sorted((host.layout.tokens, device.layout.tokens))
    if large % small:
        raise PlanRefused(f"pages of {large} tokens are not made of pages of {small}")
    if len(host.tensors) != len(device.tensors):
        raise PlanRefused(f"{len(host.tensors)} host tensors for {len(device.tensors)} device tensors")
    sets = []
    for first_token in range(0, large, small):
        host_is_small = host.layout.tokens < device.layout.tokens
        host_at = Origin(first_token if host_is_small else 0, host.first_head)
        device_at = Origin(0 if host_is_small else first_token, device.first_head)
        runs = copy_runs(device.layout, host.layout, device_at, host_at)
        sets.append(tuple(Segment(i, i, run) for i in range(len(host.tensors)) for run in runs))
    return PagePlan(_pages(host), _pages(device), 1, tuple(sets))


def _pages(cache: PagedCache) -> tuple[torch.Tensor, ...]:
    pages = tuple(as_pages(tensor) for tensor in cache.tensors)
    for page in pages:
        if page.shape[1] != cache.layout.page_bytes:
            raise PlanRefused(f"pages of {page.shape[1]} bytes are not {cache.layout}")
    return pages


def sequence_moves(host: PagedCache, device: PagedCache, host_pages: Ids, device_pages: Ids) -> Moves:
    """The moves of a run of tokens that fills these pages in order on both sides. O(pages)."""
    on_host, on_device = np.asarray(host_pages), np.asarray(device_pages)
    tokens = len(on_host) * host.layout.tokens
    if tokens != len(on_device) * device.layout.tokens:
        raise PlanRefused(
            f"{len(on_host)} pages of {host.layout.tokens} tokens do not hold what "
            f"{len(on_device)} pages of {device.layout.tokens} do"
        )
    small, large = sorted((host.layout.tokens, device.layout.tokens))
    first = np.arange(0, tokens, small)
    return page_moves(
        on_host[first // host.layout.tokens],
        on_device[first // device.layout.tokens],
        first % large // small,
    )
