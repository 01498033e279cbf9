# SPDX-License-Identifier: Apache-2.0
"""Builds the worker for this platform, with everything that is slow (pinning, compiling) done before it serves."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region

from engine_ext.vllm.compat import Traits
from gpu_ops.mover import PageMover
from gpu_ops.plan import PagePlan

from .choice import PROMOTION_KEY, Copier, PromotionRefused
from .lane import CudaLane, HostLane
from .pages import ByteCount, plan_pages
from .worker import Lanes, PageWorker

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

logger = logging.getLogger("vllm.pointsman.worker")


def build_worker(
    copier: Copier,
    kv_caches: CanonicalKVCaches,
    region: SharedOffloadRegion,
    blocks_per_chunk: int,
    traits: Traits,
    *,
    canonical_layout: bool,
) -> PageWorker:
    """The worker; from here on it owns the region. The region is still the caller's if this raises.

    Raises:
        PromotionRefused: the KV caches are not where the copier works, or Triton or the driver cannot be loaded.
    """
    kinds = {one.tensor.device.type for one in kv_caches.tensors}
    wanted = "cuda" if copier is Copier.GPU else "cpu"
    if kinds != {wanted}:
        raise PromotionRefused(f"KV caches are on {sorted(kinds)}, {copier.value} needs them on {wanted}")
    if copier is Copier.GPU:
        _pin(region, traits, canonical_layout=canonical_layout)
    plan = plan_pages(kv_caches, region, blocks_per_chunk, canonical_layout=canonical_layout)
    mover = _mover(copier, plan, host_is_pinned=region.is_pinned)
    return PageWorker(mover, ByteCount(plan), blocks_per_chunk, _lanes(copier, plan), region)


def _pin(region: SharedOffloadRegion, traits: Traits, *, canonical_layout: bool) -> None:
    if traits.pins_own_slots:
        pin_mmap_region(region, worker_slot_only=not canonical_layout)
    else:
        pin_mmap_region(region)
    if not region.is_pinned:
        logger.warning(
            "the host region could not be pinned: the driver copies pageable memory, no kernel reaches it"
        )


def _mover(copier: Copier, plan: PagePlan, *, host_is_pinned: bool) -> PageMover:
    if copier is Copier.HOST:
        return PageMover(plan, host_is_pinned=False)
    try:
        return PageMover(plan, host_is_pinned=host_is_pinned)
    except (
        Exception
    ) as error:  # a missing module or driver, a compiler that fails: all end the start with one name
        raise PromotionRefused(
            f"gpu_ops cannot run here: {error}; {PROMOTION_KEY}: vllm uses vLLM's own copy"
        ) from error


def _lanes(copier: Copier, plan: PagePlan) -> Lanes:
    if copier is Copier.HOST:
        return Lanes(*(HostLane(time.perf_counter) for _ in range(3)))
    return Lanes(*(CudaLane(torch.cuda, plan.target) for _ in range(3)))
