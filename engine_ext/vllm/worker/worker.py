# SPDX-License-Identifier: Apache-2.0
"""vLLM's OffloadingWorker over a page mover and lanes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from gpu_ops.direction import Direction
from gpu_ops.mover import PageMover
from gpu_ops.moves import block_moves

from .lane import Lane
from .pages import ByteCount


@dataclass(frozen=True, slots=True)
class Lanes:
    """Expedited loads have their own, so that they do not queue behind a long load."""

    store: Lane
    load: Lane
    expedited: Lane

    def __iter__(self) -> Any:
        return iter((self.store, self.load, self.expedited))


class PageWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM has no types here
    """Stores are demotions, loads promotions. Once built it owns the region and releases it at shutdown.

    For the worker's one thread. A transfer cannot fail half way: the mover refuses it before a byte moves, which
    ends the engine, since such a transfer would have touched another request's pages.
    """

    def __init__(
        self,
        mover: PageMover,
        size_of: ByteCount,
        blocks_per_chunk: int,
        lanes: Lanes,
        region: SharedOffloadRegion,
    ) -> None:
        self._mover: PageMover | None = mover
        self._size_of = size_of
        self._blocks_per_chunk = blocks_per_chunk
        self._lanes = lanes
        self._region = region

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """KV cache to host region."""
        return self._move(job_id, dst_spec, src_spec, Direction.DEMOTE, self._lanes.store)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Host region to KV cache. vLLM 0.33 names some loads expedited: their step waits for them."""
        lane = self._lanes.expedited if expedited else self._lanes.load
        return self._move(job_id, src_spec, dst_spec, Direction.PROMOTE, lane)

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(one.job_id, True, transfer_size=one.size_bytes, transfer_time=one.seconds)
            for lane in self._lanes
            for one in lane.finished()
        ]

    def wait(self, job_ids: Iterable[int]) -> None:
        wanted = set(job_ids)
        for lane in self._lanes:
            lane.wait(wanted)

    def shutdown(self) -> None:
        """Waits for what is under way, then unmaps the region, which nothing of ours may still view."""
        if self._mover is None:
            return
        try:
            for lane in self._lanes:
                lane.close()
        finally:
            self._mover = None
            self._region.cleanup()

    def _move(
        self, job_id: int, host: Any, device: GPULoadStoreSpec, direction: Direction, lane: Lane
    ) -> bool:
        mover = self._mover
        if mover is None:
            raise RuntimeError(f"transfer {job_id} after shutdown")
        moves = block_moves(
            host.block_ids,
            device.block_ids,
            device.group_sizes,
            device.block_indices,
            self._blocks_per_chunk,
        )
        move = mover.promote if direction is Direction.PROMOTE else mover.demote
        lane.run(job_id, self._size_of(moves, direction), lambda: move(moves))
        return True
