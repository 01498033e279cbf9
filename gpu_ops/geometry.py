# SPDX-License-Identifier: Apache-2.0
"""Addresses: where a segment's bytes lie in memory, for any page numbers.

    host address    host_base + chunk * host_chunk_stride + slot * host_page_stride + fragment * host_stride
    device address  device_base + page * device_page_stride + fragment * device_stride

with chunk, slot = divmod(host page, pages_per_chunk). The same formula is evaluated on the CPU (descriptors.py) and
inside the kernel (kernels.py). Addresses are the CPU's own: pinned host memory has the same address on the GPU under
unified addressing, which is what vLLM relies on too (`cpu/swap_blocks_triton.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .plan import PagePlan, Segment
from .runs import run_bytes


@dataclass(frozen=True, slots=True)
class SegmentGeometry:
    """One segment as plain integers; all but the writers are bytes."""

    host_base: int
    host_chunk_stride: int
    host_page_stride: int
    host_stride: int
    device_base: int
    device_page_stride: int
    device_stride: int
    fragment_bytes: int
    payload_bytes: int
    num_writers: int
    writer_index: int

    @property
    def fragments(self) -> int:
        return self.payload_bytes // self.fragment_bytes

    @property
    def unit_bytes(self) -> int:
        """The widest access that every fragment allows on both sides: 16, 4 or 1 bytes."""
        mixed = self.host_base | self.host_chunk_stride | self.host_page_stride | self.device_base
        mixed |= self.device_page_stride | self.fragment_bytes
        if self.fragments > 1:
            mixed |= self.host_stride | self.device_stride
        return next(unit for unit in (16, 4, 1) if mixed % unit == 0)


def segment_geometry(plan: PagePlan, segment: Segment) -> SegmentGeometry:
    host, device = plan.host[segment.host_tensor], plan.device[segment.device_tensor]
    run = segment.run
    return SegmentGeometry(
        host_base=host.data_ptr() + run.canonical_offset,
        host_chunk_stride=host.stride(0),
        host_page_stride=plan.host_page_bytes(segment.host_tensor) if plan.pages_per_chunk > 1 else 0,
        host_stride=run.canonical_stride,
        device_base=device.data_ptr() + run.local_offset,
        device_page_stride=device.stride(0),
        device_stride=run.local_stride,
        fragment_bytes=run.fragment_size,
        payload_bytes=run_bytes(run),
        num_writers=segment.num_writers,
        writer_index=segment.writer_index,
    )
