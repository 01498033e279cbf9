# SPDX-License-Identifier: Apache-2.0
"""A page plan: everything about moving pages that does not change from one transfer to the next.

Host memory holds chunks, each of `pages_per_chunk` pages; the device holds pages. Both are what vLLM's workers hold
(`vllm/v1/kv_offload/cpu/gpu_worker.py`, read in 0.32): int8 tensors of two dimensions, one row per chunk or block,
whose rows may lie further apart than they are long (a worker's slot in the shared region).

    host[i]    (chunks, pages_per_chunk * host page bytes)     stride (row stride, 1)
    device[i]  (blocks, device page bytes)                     stride (row stride, 1)

A host page has one number: chunk * pages_per_chunk + slot. A set lists the segments to copy when one host page meets
one device page: in vLLM one set per KV cache group, in a block-size conversion one per position of the small page.

Building a plan is O(segments) and checks once that no segment leaves its pages; moves are checked per transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .errors import PlanRefused
from .runs import Run, canonical_end, local_end, whole_page

# Offsets inside a page are 32-bit in the kernels, with room for a tile behind the last byte.
MAX_PAGE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Segment:
    """One run between a page of a host tensor and a page of a device tensor.

    Of `num_writers` ranks that hold the same bytes, rank `writer_index` demotes the host pages whose number leaves
    that remainder (vLLM's CanonicalPageMapping.is_writer). Promotion ignores it.
    """

    host_tensor: int
    device_tensor: int
    run: Run
    num_writers: int = 1
    writer_index: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PagePlan:
    """Tensors and segments. Raises PlanRefused where a segment would leave its page."""

    host: tuple[torch.Tensor, ...]
    device: tuple[torch.Tensor, ...]
    pages_per_chunk: int
    sets: tuple[tuple[Segment, ...], ...]
    num_host_pages: int = field(init=False)
    """Host page numbers are below this."""
    num_device_pages: int = field(init=False)
    """Device page numbers are below this."""

    def __post_init__(self) -> None:
        if self.pages_per_chunk < 1:
            raise PlanRefused(f"pages_per_chunk is {self.pages_per_chunk}, at least 1 is needed")
        for tensor in (*self.host, *self.device):
            _check_pages(tensor)
        for tensor in self.host:
            if tensor.shape[1] % self.pages_per_chunk:
                raise PlanRefused(f"a chunk of {tensor.shape[1]} bytes is not {self.pages_per_chunk} pages")
        if not self.host or not self.device or not self.sets:
            raise PlanRefused("a plan needs tensors on both sides, and a set")
        for segment in (one for segments in self.sets for one in segments):
            self._check(segment)
        chunks = min(int(tensor.shape[0]) for tensor in self.host)
        object.__setattr__(self, "num_host_pages", chunks * self.pages_per_chunk)
        object.__setattr__(self, "num_device_pages", min(int(tensor.shape[0]) for tensor in self.device))

    def host_page_bytes(self, tensor: int) -> int:
        return int(self.host[tensor].shape[1]) // self.pages_per_chunk

    @property
    def target(self) -> torch.device:
        """Where the KV caches are."""
        return self.device[0].device

    def _check(self, segment: Segment) -> None:
        run = segment.run
        if not (0 <= segment.host_tensor < len(self.host) and 0 <= segment.device_tensor < len(self.device)):
            raise PlanRefused(f"{segment} names a tensor that is not in the plan")
        if not 0 <= segment.writer_index < segment.num_writers:
            raise PlanRefused(f"writer {segment.writer_index} of {segment.num_writers}")
        if run.fragment_size < 1 or run.num_fragments < 1 or min(run.local_offset, run.canonical_offset) < 0:
            raise PlanRefused(f"{run} copies nothing, or from before its page")
        if run.num_fragments > 1 and min(run.local_stride, run.canonical_stride) < run.fragment_size:
            raise PlanRefused(f"the fragments of {run} overlap")
        if local_end(run) > self.device[segment.device_tensor].shape[1]:
            raise PlanRefused(
                f"{run} leaves the device page of {self.device[segment.device_tensor].shape[1]} bytes"
            )
        if canonical_end(run) > self.host_page_bytes(segment.host_tensor):
            raise PlanRefused(
                f"{run} leaves the host page of {self.host_page_bytes(segment.host_tensor)} bytes"
            )


def _check_pages(tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.int8 or tensor.ndim != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise PlanRefused(
            f"pages are int8 rows with contiguous bytes, not {tensor.dtype} of shape {tuple(tensor.shape)} "
            f"and strides {tensor.stride()}"
        )
    if tensor.shape[1] > MAX_PAGE_BYTES:
        raise PlanRefused(f"a row of {tensor.shape[1]} bytes is longer than {MAX_PAGE_BYTES}")
    if tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        raise PlanRefused(f"rows of {tensor.shape[1]} bytes every {tensor.stride(0)} bytes overlap")


class PageMapping(Protocol):
    """What is read of vLLM's CanonicalPageMapping."""

    @property
    def runs(self) -> Sequence[Run]: ...
    @property
    def num_writers(self) -> int: ...
    @property
    def writer_index(self) -> int: ...


class CacheRef(Protocol):
    """What is read of vLLM's CanonicalKVCacheRef."""

    @property
    def tensor_idx(self) -> int: ...
    @property
    def page_size_bytes(self) -> int: ...
    @property
    def mapping(self) -> PageMapping | None: ...


def plan_from_refs(
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    refs_per_group: Sequence[Sequence[CacheRef]],
    pages_per_chunk: int,
    *,
    canonical_layout: bool,
) -> PagePlan:
    """The plan of a vLLM worker: one set per KV cache group, host and device tensors paired by index.

    Args:
        host: CPU tensors, int8 (chunks, chunk bytes), as `SharedOffloadRegion` hands them out.
        device: GPU tensors, int8 (blocks, page bytes), as `CPUOffloadingWorker` views them.
        refs_per_group: `CanonicalKVCaches.group_data_refs`.
        pages_per_chunk: vLLM's blocks_per_chunk.
        canonical_layout: whether host pages are canonical (refs' mappings) or the worker's own.
    """
    sets = tuple(
        tuple(segment for ref in refs for segment in _segments(ref, canonical_layout))
        for refs in refs_per_group
    )
    return PagePlan(tuple(host), tuple(device), pages_per_chunk, sets)


def _segments(ref: CacheRef, canonical_layout: bool) -> list[Segment]:
    index = ref.tensor_idx
    if not canonical_layout:
        return [Segment(index, index, whole_page(ref.page_size_bytes))]
    mapping = ref.mapping
    if mapping is None:
        raise PlanRefused(
            f"a layer of tensor {index} has no canonical mapping, the canonical layout needs one"
        )
    return [Segment(index, index, run, mapping.num_writers, mapping.writer_index) for run in mapping.runs]
