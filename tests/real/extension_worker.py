# SPDX-License-Identifier: Apache-2.0
"""The extension's worker on vLLM's KV cache descriptions and its shared region.

Played by extension_scenarios.py in the engine's venv. What is expected is computed from slices of bytes, with none of the
code under test.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from offloading import EXTRA, offloading_config, shared_files
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu import gpu_worker, shared_offload_region
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from engine_ext.vllm.installed import installed_traits
from engine_ext.vllm.spec import PointsmanOffloadingSpec
from engine_ext.vllm.worker.build import _pin
from engine_ext.vllm.worker.lane import CudaLane
from engine_ext.vllm.worker.worker import Lanes

BLOCKS, CHUNKS = 24, 16


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@contextlib.contextmanager
def worker_of(
    caches: CanonicalKVCaches, per_chunk: int, **config: Any
) -> Iterator[tuple[Any, torch.Tensor, int]]:
    """A worker, the region as (chunks, row bytes), and the bytes of this rank's slot in a row."""
    block_bytes = sum(one.page_size_bytes for one in caches.tensors)
    ranks = 1 if config.get("replicated_layout") else config.get("world_size", 1)
    row_bytes = -(-block_bytes * per_chunk * ranks // 4096) * 4096
    made = offloading_config(
        EXTRA | {"cpu_bytes_to_use": row_bytes * CHUNKS},
        block_bytes=block_bytes,
        blocks_per_chunk=per_chunk,
        groups=len(caches.group_data_refs),
        **config,
    )
    spec = PointsmanOffloadingSpec(made)
    worker = spec.get_worker(caches)
    assert spec.get_worker(caches) is worker
    mapped = worker._region.mmap_obj
    with Path(worker._region.mmap_path).open("r+b") as file:
        own = mmap.mmap(file.fileno(), 0)  # goes with the last tensor over it
    region = torch.frombuffer(memoryview(own), dtype=torch.int8).view(CHUNKS, row_bytes)
    region.copy_(random_bytes(CHUNKS, row_bytes))
    try:
        yield worker, region, block_bytes * per_chunk
    finally:
        worker.shutdown()
        worker.shutdown()
        assert mapped.closed, "something still views the region"
        assert not shared_files(made.engine_id)


def caches_of(pages: list[int], groups: list[list[tuple[int, int]]]) -> CanonicalKVCaches:
    """Tensors of these page sizes; a group's layers as (tensor, bytes used of its page)."""
    tensors = [CanonicalKVCacheTensor(random_bytes(BLOCKS, size), size) for size in pages]
    return CanonicalKVCaches(
        tensors, [[CanonicalKVCacheRef(index, used) for index, used in layers] for layers in groups]
    )


def transfer(
    rng: random.Random, per_chunk: int, groups: int
) -> tuple[Any, Any, list[tuple[int, int, int, int]]]:
    """A random transfer: both specs, and its rows (group, block, chunk, slot)."""
    free_blocks, free_chunks = rng.sample(range(BLOCKS), BLOCKS), rng.sample(range(CHUNKS), CHUNKS)
    sizes, firsts, blocks, chunks, rows = [], [], [], [], []
    for group in range(groups):
        size, first = rng.choice([0, 1, 2, 5]), rng.randrange(9)
        mine: dict[int, int] = {}
        for i in range(size):
            number, slot = divmod(first + i, per_chunk)
            if number not in mine:
                mine[number] = free_chunks.pop()
            block = free_blocks.pop()
            blocks.append(block)
            rows.append((group, block, mine[number], slot))
        sizes.append(size)
        firsts.append(first)
        chunks += mine.values()
    device = GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=firsts)
    return device, CPULoadStoreSpec(chunks), rows


def one_transfer(
    job: int,
    rng: random.Random,
    per_chunk: int,
    caches: CanonicalKVCaches,
    worker: Any,
    region: Any,
    slot: int,
) -> int:
    """A random store (odd jobs) or load against slices; whole buffers are compared. `slot`: where this rank's begins."""
    tensors = caches.tensors
    starts = [slot + sum(one.page_size_bytes for one in tensors[:i]) * per_chunk for i in range(len(tensors))]
    device, host, rows = transfer(rng, per_chunk, len(caches.group_data_refs))
    want_region, want = region.clone(), [one.tensor.clone() for one in tensors]
    size = 0
    for group, block, chunk, place in rows:
        for ref in caches.group_data_refs[group]:
            start = starts[ref.tensor_idx] + place * tensors[ref.tensor_idx].page_size_bytes
            page = want[ref.tensor_idx][block, : ref.page_size_bytes]
            row = want_region[chunk, start : start + ref.page_size_bytes]
            (row if job % 2 else page).copy_(page if job % 2 else row)
            size += ref.page_size_bytes
    if job % 2:
        assert worker.submit_store(job, device, host)
    else:
        assert worker.submit_load(job, host, device, **({"expedited": True} if job % 4 else {}))
    worker.wait({job})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (job, True, size)
    assert result.transfer_time >= 0
    assert torch.equal(region, want_region)
    assert all(torch.equal(a.tensor, b) for a, b in zip(tensors, want, strict=True))
    return size


def direct() -> dict[str, Any]:
    """The worker's own layout as rank 1 of 2: in its slot, or in the only one where both ranks hold the same bytes."""
    rng, moved = random.Random(4), 0
    for replicated in (False, True):
        for per_chunk in (1, 2, 3):
            caches = caches_of([96, 32, 64], [[(0, 96), (1, 20)], [(1, 32), (2, 64)]])
            made = worker_of(caches, per_chunk, rank=1, world_size=2, replicated_layout=replicated)
            with made as (worker, region, slot_bytes):
                slot = 0 if replicated else slot_bytes
                for job in range(30):
                    moved += one_transfer(job, rng, per_chunk, caches, worker, region, slot)
    return {"moved": moved}


def canonical_caches(rank: int) -> CanonicalKVCaches:
    """One layer split between two ranks in fragments of 16, and one that both hold whole and write in turn."""
    split = CanonicalPageMapping(128, 64, (CopyRun(0, 16 * rank, 16, 4, 16, 32),), 1, 0, True)
    whole = CanonicalPageMapping(32, 32, (CopyRun(0, 0, 32, 1, 32, 32),), 2, rank, True)
    tensors = [CanonicalKVCacheTensor(random_bytes(BLOCKS, size), size) for size in (64, 32)]
    refs = [CanonicalKVCacheRef(0, 64, split), CanonicalKVCacheRef(1, 32, whole)]
    return CanonicalKVCaches(tensors, [refs])


def canonical() -> dict[str, Any]:
    """Two ranks store the halves of canonical pages; a third reader finds each page whole, written once."""
    rng, per_chunk = random.Random(5), 2
    written = [0, 0]
    device, host, rows = transfer(rng, per_chunk, 1)
    while len(rows) < 5:
        device, host, rows = transfer(rng, per_chunk, 1)
    pages = []
    for rank in (0, 1):
        caches = canonical_caches(rank)
        with worker_of(caches, per_chunk, rank=rank, world_size=2, canonical_layout=True) as (
            worker,
            region,
            _,
        ):
            want = region.clone()
            for _, block, chunk, slot in rows:
                for i in range(4):
                    to = 128 * slot + 16 * rank + 32 * i
                    want[chunk, to : to + 16] = caches.tensors[0].tensor[block, 16 * i : 16 * i + 16]
                    written[rank] += 16
                if (chunk * per_chunk + slot) % 2 == rank:
                    to = 128 * per_chunk + 32 * slot
                    want[chunk, to : to + 32] = caches.tensors[1].tensor[block]
                    written[rank] += 32
            worker.submit_store(1, device, host)
            (stored,) = worker.get_finished()
            assert torch.equal(region, want)
            assert stored.transfer_size == written[rank]
            kept = [one.tensor.clone() for one in caches.tensors]
            for one in caches.tensors:
                one.tensor.zero_()
            worker.submit_load(2, host, device)
            (loaded,) = worker.get_finished()
            assert loaded.transfer_size == 96 * len(rows)
            pages += [torch.equal(caches.tensors[0].tensor[b], kept[0][b]) for _, b, _, _ in rows]
    return {"pages": all(pages), "written": sum(written), "expected": len(rows) * (128 + 32)}


class Stream:
    """A stream of a machine without CUDA: what is enqueued is done at once."""

    def wait_stream(self, other: Stream) -> None: ...
    def synchronize(self) -> None: ...


class Event:
    """Over when `open` says so."""

    open = False

    def record(self, stream: Stream) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return Event.open

    def elapsed_time(self, end: Event) -> float:
        return 2.0


def streams() -> dict[str, Any]:
    """The worker on CUDA's lanes: results come when their events are over, stores and both kinds of loads apart."""
    cuda = types.SimpleNamespace(
        Stream=lambda _: Stream(),
        Event=lambda enable_timing: Event(),
        current_stream=lambda _: Stream(),
        stream=lambda _: contextlib.nullcontext(),
    )
    caches = caches_of([64], [[(0, 64)]])
    with worker_of(caches, 1) as (worker, region, _):
        worker._lanes = Lanes(*(CudaLane(cuda, "cuda:0") for _ in range(3)))
        device = GPULoadStoreSpec([3, 4], group_sizes=[2], block_indices=[0])
        worker.submit_load(1, CPULoadStoreSpec([7, 8]), device)
        worker.submit_load(2, CPULoadStoreSpec([9, 8]), device, expedited=True)
        worker.submit_store(3, device, CPULoadStoreSpec([1, 2]))
        early = worker.get_finished()
        worker.wait({1, 2, 3})
        Event.open = True
        results = [(one.job_id, one.transfer_size, one.transfer_time) for one in worker.get_finished()]
        moved = torch.equal(region[1, :64], region[9, :64]) and torch.equal(region[2, :64], region[8, :64])
    return {"early": early, "results": results, "moved": moved}


def pinning() -> dict[str, Any]:
    """Pinning as each version wants it to be asked for, with registrations that only take notes."""
    noted: list[int] = []
    gpu_worker.host_register = lambda address, size: noted.append(size) or True
    shared_offload_region.host_unregister = lambda address: None
    result = {}
    for canonical_layout in (False, True):
        noted.clear()
        region = shared_offload_region.SharedOffloadRegion(
            f"test-pin-{os.getpid()}", 4, rank=0, kv_bytes_per_chunk=8 << 20, cpu_page_size=2 << 20
        )
        _pin(region, installed_traits(), canonical_layout=canonical_layout)
        result["canonical" if canonical_layout else "direct"] = [region.is_pinned, sum(noted)]
        region.cleanup()
    return result
