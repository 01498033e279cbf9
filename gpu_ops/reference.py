# SPDX-License-Identifier: Apache-2.0
"""What the kernels must do, in plain torch on the CPU: slices of rows, no addresses.

Slow on purpose and written without the code it checks. `promote` and `demote` work on any plan whose tensors are in
CPU memory; `copy_tokens` works on the tokens of pages, without plans or runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .layouts import Order, Origin, PageLayout, Placement
from .moves import Moves
from .plan import PagePlan


def promote(plan: PagePlan, moves: Moves) -> None:
    """Copies every fragment of the moves from the host page to the device page."""
    for host, device, _ in _fragments(plan, moves):
        device.copy_(host)


def demote(plan: PagePlan, moves: Moves) -> None:
    """Copies every fragment that this rank writes from the device page to the host page."""
    for host, device, is_writer in _fragments(plan, moves):
        if is_writer:
            host.copy_(device)


def _fragments(plan: PagePlan, moves: Moves) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """(bytes of the host page, bytes of the device page, whether this rank writes them) per fragment."""
    for host_page, device_page, number in moves.tolist():
        chunk, slot = divmod(host_page, plan.pages_per_chunk)
        for segment in plan.sets[number]:
            run = segment.run
            page_bytes = plan.host_page_bytes(segment.host_tensor)
            host_row = plan.host[segment.host_tensor][chunk][slot * page_bytes : (slot + 1) * page_bytes]
            device_row = plan.device[segment.device_tensor][device_page]
            is_writer = host_page % segment.num_writers == segment.writer_index
            for i in range(run.num_fragments):
                at_host = run.canonical_offset + i * run.canonical_stride
                at_device = run.local_offset + i * run.local_stride
                yield (
                    host_row[at_host : at_host + run.fragment_size],
                    device_row[at_device : at_device + run.fragment_size],
                    is_writer,
                )


def as_tokens(page: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """A page's bytes as (token, head, plane, byte), a view. `page` is int8 (page_bytes,), contiguous."""
    n, h, size, planes = layout.tokens, layout.heads, layout.head_bytes, layout.placement.planes
    nhd = layout.order is Order.NHD
    if layout.placement is Placement.JOINED:
        grid = page.view(n, h, planes, size) if nhd else page.view(h, n, planes, size).transpose(0, 1)
    else:
        grid = (
            page.view(planes, n, h, size).permute(1, 2, 0, 3)
            if nhd
            else page.view(planes, h, n, size).permute(2, 1, 0, 3)
        )
    return grid


def copy_tokens(
    source: torch.Tensor,
    source_layout: PageLayout,
    source_at: Origin,
    target: torch.Tensor,
    target_layout: PageLayout,
    target_at: Origin,
) -> None:
    """Copies the tokens and heads that two pages have in common, whatever their layouts."""
    first_token, first_head = max(source_at.token, target_at.token), max(source_at.head, target_at.head)
    last_token = min(source_at.token + source_layout.tokens, target_at.token + target_layout.tokens)
    last_head = min(source_at.head + source_layout.heads, target_at.head + target_layout.heads)

    def common(page: torch.Tensor, layout: PageLayout, at: Origin) -> torch.Tensor:
        return as_tokens(page, layout)[
            first_token - at.token : last_token - at.token, first_head - at.head : last_head - at.head
        ]

    common(target, target_layout, target_at).copy_(common(source, source_layout, source_at))
