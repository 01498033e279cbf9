# SPDX-License-Identifier: Apache-2.0
"""An offloading spec that runs vLLM's own offloading connector where there is no GPU.

vLLM refuses to build its copy engine off CUDA and XPU. Here the "device" KV cache is ordinary memory, so the
copies are memory moves. Only that copy engine is replaced: the scheduler side, the shared host region, the
eviction policies, the secondary tiers (P2P included), KV events and metrics are vLLM's, unchanged.

`kv_connector_extra_config`: `{"spec_name": "HostCopyOffloadingSpec", "spec_module_path": "host_copy_spec", ...}`
with this directory on PYTHONPATH. Written against vLLM 0.32 and 0.33 (vllm/v1/kv_offload/base.py, cpu/gpu_worker.py).
Copies happen inside submit_*, in the worker's own (direct) layout; their results surface at the next poll.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostCopyWorker(OffloadingWorker):
    """Copies pages between the engine's KV tensors and its slot of the shared host region."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._refs = kv_caches.group_data_refs
        self._device = []
        self._host = []
        self._finished: list[TransferResult] = []
        for cache in kv_caches.tensors:
            page_bytes = cache.page_size_bytes
            self._device.append(cache.tensor.view(torch.int8).view(-1, page_bytes))
            self._host.append(region.create_next_worker_view(page_bytes * blocks_per_chunk))

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every copy was done when it was submitted."""

    def shutdown(self) -> None:
        self._device.clear()
        self._host.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, *, to_host: bool) -> bool:
        started = time.perf_counter()
        moved_bytes = 0
        for group, block, chunk, slot in self._pairs(device, host):
            for ref in self._refs[group]:
                page_bytes = ref.page_size_bytes
                device_row = self._device[ref.tensor_idx][block]
                host_row = self._host[ref.tensor_idx][chunk]
                slot_bytes = host_row.numel() // self._blocks_per_chunk
                device_address = device_row.data_ptr()
                host_address = host_row.data_ptr() + slot * slot_bytes
                source, target = (device_address, host_address) if to_host else (host_address, device_address)
                ctypes.memmove(target, source, page_bytes)
                moved_bytes += page_bytes
        self._finished.append(
            TransferResult(
                job_id, True, transfer_size=moved_bytes, transfer_time=time.perf_counter() - started
            )
        )
        return True

    def _pairs(self, device: GPULoadStoreSpec, host: LoadStoreSpec) -> Iterator[tuple[int, int, int, int]]:
        """(group, device block, host chunk, slot inside the chunk) of every page to move.

        A group's device blocks are logically contiguous from `block_indices[group]`; its host chunks cover
        them, and the first chunk may begin before the first block (vllm/v1/kv_offload/base.py).
        """
        per_chunk = self._blocks_per_chunk
        next_block = next_chunk = 0
        for group, (size, first) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
            if size == 0:
                continue
            skipped = first % per_chunk
            for i in range(size):
                chunk, slot = divmod(skipped + i, per_chunk)
                yield (
                    group,
                    int(device.block_ids[next_block + i]),
                    int(host.block_ids[next_chunk + chunk]),
                    slot,
                )
            next_block += size
            next_chunk += -(-(skipped + size) // per_chunk)


class HostCopyOffloadingSpec(TieringOffloadingSpec):
    """vLLM's tiering spec with HostCopyWorker as its worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
