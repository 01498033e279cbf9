# SPDX-License-Identifier: Apache-2.0
"""vLLM's transfer handler on a machine without a GPU.

It refuses tensors that are not on a GPU and needs CUDA streams, so it is built without its constructor and runs with
streams that do nothing. Written against vLLM 0.32 (vllm/v1/kv_offload/cpu/gpu_worker.py).
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import CanonicalKVCacheRef
from vllm.v1.kv_offload.cpu import gpu_worker

from gpu_ops.direction import Direction
from gpu_ops.plan import PagePlan


class NoStream:
    """A stream, and an event, of a machine without a GPU."""

    def wait_stream(self, _: object) -> None: ...
    def wait_event(self, _: object) -> None: ...
    def record(self, _: object) -> None: ...


NO_PLATFORM = types.SimpleNamespace(
    Stream=NoStream,
    current_stream=lambda: None,
    stream=lambda _: contextlib.nullcontext(),
    is_xpu=lambda: False,
)


def handler(
    plan: PagePlan,
    refs: list[list[CanonicalKVCacheRef]],
    direction: Direction,
    copy: Any,
    *,
    canonical_layout: bool,
) -> gpu_worker.SingleDirectionOffloadingHandler:
    """vLLM's handler as its constructor leaves it, but for the checks that tensors are on a GPU."""
    one = object.__new__(gpu_worker.SingleDirectionOffloadingHandler)
    one.gpu_to_cpu = direction is Direction.DEMOTE
    one.src_tensors = list(plan.device if one.gpu_to_cpu else plan.host)
    one.dst_tensors = list(plan.host if one.gpu_to_cpu else plan.device)
    one.layer_refs_per_group = refs
    one._swap_blocks_batch = copy
    one.src_blocks_per_chunk = 1 if one.gpu_to_cpu else plan.pages_per_chunk
    one.dst_blocks_per_chunk = plan.pages_per_chunk if one.gpu_to_cpu else 1
    one._canonical_copy_plans = None
    one._fill_group_ops = one._fill_direct_ops
    if canonical_layout:
        one._canonical_copy_plans = [
            [gpu_worker._build_copy_plan(ref, one.gpu_to_cpu) for ref in group] for group in refs
        ]
        one._fill_group_ops = one._fill_canonical_ops
    one._scratch_bases_src = np.empty(0, dtype=np.uint64)
    one._scratch_bases_dst = np.empty(0, dtype=np.uint64)
    one._transfer_events, one._transfers = {}, deque()
    one._stream_pool, one._event_pool, one._buffer_pool = [], [NoStream(), NoStream()], []
    return one
