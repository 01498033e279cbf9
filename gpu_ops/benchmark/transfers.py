# SPDX-License-Identifier: Apache-2.0
"""The transfers that are timed, and everyone who can make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gpu_ops.descriptors import Descriptors, fragment_tables, unroll
from gpu_ops.direction import Direction
from gpu_ops.dispatch import Tuning
from gpu_ops.errors import GpuOpsError
from gpu_ops.launch import PageKernel, copy_with_kernel
from gpu_ops.mover import PageMover
from gpu_ops.moves import Moves, block_moves
from gpu_ops.plan import PagePlan, plan_from_refs
from gpu_ops.runs import CopyRun, run_bytes

from .machine import Machine

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Mapping:
    """A canonical mapping, with the names that plan.py and vLLM's worker read."""

    canonical_page_size_bytes: int
    local_page_size_bytes: int
    runs: tuple[CopyRun, ...]
    num_writers: int = 1
    writer_index: int = 0
    parallelism_agnostic: bool = True


@dataclass(frozen=True, slots=True)
class Ref:
    """A layer's reference to its tensor, with the names that plan.py and vLLM's worker read."""

    tensor_idx: int
    page_size_bytes: int
    mapping: Mapping


@dataclass(frozen=True, slots=True)
class Shape:
    """`blocks` blocks of `layers` layers, whose pages are copied by `run` (whole pages: one fragment)."""

    layers: int
    blocks: int
    run: CopyRun
    canonical_page_bytes: int

    @property
    def page_bytes(self) -> int:
        return run_bytes(self.run)

    @property
    def total_bytes(self) -> int:
        return self.layers * self.blocks * self.page_bytes

    @property
    def descriptors(self) -> int:
        return self.layers * self.blocks * self.run.num_fragments

    @property
    def canonical_layout(self) -> bool:
        return self.canonical_page_bytes != self.page_bytes


class Transfer:
    """One shape laid out in the given memory, ready to be moved by anyone. Blocks are in random order on both sides."""

    def __init__(
        self, machine: Machine, shape: Shape, host: torch.Tensor, device: torch.Tensor, seed: int
    ) -> None:
        self.machine, self.shape = machine, shape
        self.refs = [
            Ref(i, shape.page_bytes, Mapping(shape.canonical_page_bytes, shape.page_bytes, (shape.run,)))
            for i in range(shape.layers)
        ]
        # A host row holds all layers of a block, as a chunk of vLLM's shared region does.
        row = shape.layers * shape.canonical_page_bytes
        rows = host[: shape.blocks * row].view(shape.blocks, row)
        self.host = [
            rows[:, i * shape.canonical_page_bytes : (i + 1) * shape.canonical_page_bytes]
            for i in range(shape.layers)
        ]
        layer_bytes = shape.blocks * shape.page_bytes
        self.device = [
            device[i * layer_bytes : (i + 1) * layer_bytes].view(shape.blocks, shape.page_bytes)
            for i in range(shape.layers)
        ]
        random = np.random.default_rng(seed)
        self.chunks = random.permutation(shape.blocks).astype(np.int32)
        self.blocks = random.permutation(shape.blocks).astype(np.int32)
        self.plan: PagePlan = plan_from_refs(
            self.host, self.device, [self.refs], 1, canonical_layout=shape.canonical_layout
        )
        self._flat_host, self._flat_device = host[: shape.total_bytes], device[: shape.total_bytes]

    def moves(self) -> Moves:
        return block_moves(self.chunks, self.blocks, [len(self.blocks)], [0], 1)

    def contiguous(self, direction: Direction) -> Work:
        """One copy of as many bytes, neither scattered nor gathered: the link's ceiling."""
        pair = (self._flat_device, self._flat_host)
        target, source = pair if direction is Direction.PROMOTE else pair[::-1]
        return lambda: _quietly(target.copy_(source, non_blocking=True))

    def ours(self, direction: Direction, tuning: Tuning) -> Work:
        """Everything a worker does for one transfer, from its block lists on."""
        mover = PageMover(self.plan, tuning, batch_copy=self.machine.batch_copy)
        move = mover.promote if direction is Direction.PROMOTE else mover.demote
        return lambda: _quietly(move(self.moves()))

    def kernel(self, direction: Direction, programs: int) -> Work:
        kernel = PageKernel(self.plan, programs)
        return lambda: kernel.run(self.moves(), direction)

    def driver(self, direction: Direction) -> Work:
        tables, copy = fragment_tables(self.plan), self.machine.batch_copy

        def work() -> None:
            flat = unroll(self.plan, tables, self.moves(), direction)
            copy(flat.sources, flat.targets, flat.sizes, direction is Direction.PROMOTE)

        return work

    def descriptor_kernel(self, direction: Direction, programs: int) -> Work:
        flat = self.flat(direction)
        return lambda: copy_with_kernel(flat, self.machine.device, programs)

    def flat(self, direction: Direction) -> Descriptors:
        return unroll(self.plan, fragment_tables(self.plan), self.moves(), direction)

    def index_copy(self) -> Work:
        """Promotion in plain torch: gather on the CPU into pinned memory, copy, index_copy_ per layer."""
        staging = [self.machine.host_bytes(layer.numel()).view_as(layer) for layer in self.device]
        chunks = torch.from_numpy(self.chunks)
        blocks = torch.from_numpy(self.blocks).long().to(self.machine.device)

        def work() -> None:
            for host, device, stage in zip(self.host, self.device, staging, strict=True):
                torch.index_select(host[:, : stage.shape[1]], 0, chunks, out=stage)
                device.index_copy_(0, blocks, stage.to(device.device, non_blocking=True))

        return work

    def vllm(self, direction: Direction) -> Work | None:
        """The whole transfer by vLLM's own handler, its streams included. None where vLLM cannot do it here."""
        try:
            from vllm.v1.kv_offload.base import GPULoadStoreSpec  # noqa: PLC0415
            from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec  # noqa: PLC0415
            from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler  # noqa: PLC0415
        except ImportError:
            return None
        if self.machine.device.type != "cuda":
            return None
        handler = SingleDirectionOffloadingHandler(
            gpu_tensors=self.device,
            cpu_tensors=self.host,
            blocks_per_chunk=1,
            layer_refs_per_group=[self.refs],
            gpu_to_cpu=direction is Direction.DEMOTE,
            canonical_layout=self.shape.canonical_layout,
        )
        chunks, blocks = self.chunks.tolist(), self.blocks.tolist()
        specs = (CPULoadStoreSpec(chunks), GPULoadStoreSpec(blocks, [len(blocks)], [0]))
        numbers = iter(range(10**9))

        def work() -> None:
            job = next(numbers)
            if not handler.transfer_async(job, *(specs if direction is Direction.PROMOTE else specs[::-1])):
                raise GpuOpsError("vLLM refused a transfer")
            handler.wait({job})
            handler.get_finished()

        return work


def whole_pages(layers: int, blocks: int, page_bytes: int) -> Shape:
    return Shape(layers, blocks, CopyRun(0, 0, page_bytes, 1, page_bytes, page_bytes), page_bytes)


def shard(layers: int, blocks: int, fragment_bytes: int, fragments: int, ranks: int) -> Shape:
    """One rank's pages of a token-major canonical page: every fragment is one token's heads of this rank."""
    run = CopyRun(0, fragment_bytes, fragment_bytes, fragments, fragment_bytes, ranks * fragment_bytes)
    return Shape(layers, blocks, run, ranks * fragment_bytes * fragments)


def _quietly(_: object) -> None:
    """Makes a Work of a call with a result."""
