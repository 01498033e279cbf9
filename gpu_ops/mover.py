# SPDX-License-Identifier: Apache-2.0
"""Promotion and demotion as a worker uses them: checked, routed, enqueued.

    mover = PageMover(plan)                     # once per worker; compiles the kernels
    with torch.cuda.stream(transfer_stream):
        mover.promote(moves)                    # host pages to device pages
        mover.demote(moves)                     # device pages to host pages

On CUDA everything is enqueued on the current stream: order it behind the work that writes the pages, and wait for an
event behind it before reading them. On the CPU the copies are done when the call returns.

`DescriptorCopy` does the same for callers that hold flat descriptors: it has the signature of vLLM's
`ops.swap_blocks_batch` and can take its place in `SingleDirectionOffloadingHandler`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from .descriptors import Descriptors, fragment_tables, unroll
from .direction import Direction
from .dispatch import Batch, Reach, Route, Tuning, choose, load_tuning
from .driver import BatchCopy, DriverCopy, copy_on_host
from .errors import PlanRefused
from .moves import Moves, check_moves
from .plan import PagePlan

if TYPE_CHECKING:
    from .launch import PageKernel


class PageMover:
    """Moves pages of one plan. Not thread-safe: one transfer thread, as vLLM's workers have."""

    def __init__(
        self,
        plan: PagePlan,
        tuning: Tuning | None = None,
        *,
        batch_copy: BatchCopy | None = None,
        host_is_pinned: bool | None = None,
    ) -> None:
        """Prepares tables and, on CUDA with pinned host memory, compiles the kernels.

        Args:
            plan: what is moved; its tensors stay where they are for the life of the mover.
            tuning: thresholds; the package's own file if not given.
            batch_copy: instead of the driver's copy, e.g. vLLM's `ops.swap_blocks_batch`; needed where the
                device is neither an NVIDIA GPU nor the CPU.
            host_is_pinned: whether the GPU may read the host tensors; asked of torch if not given.
        """
        self._plan = plan
        self._tuning = tuning or load_tuning()
        self._tables = fragment_tables(plan)
        if host_is_pinned is None:
            host_is_pinned = is_nvidia(plan.target) and all(tensor.is_pinned() for tensor in plan.host)
        self._reach = _reach(plan.target, host_is_pinned)
        self._copy = batch_copy or _copy_for(plan.target)
        self._kernel = _kernel(plan, self._tuning) if self._reach.kernel_reaches_host else None
        self._sizes = [(len(table), table.total_bytes) for table in self._tables]

    def promote(self, moves: Moves) -> Route:
        """Host to device. Returns who copies. Raises PlanRefused before anything is enqueued."""
        return self._move(moves, Direction.PROMOTE)

    def demote(self, moves: Moves) -> Route:
        """Device to host, where this rank is the writer. Otherwise as `promote`."""
        return self._move(moves, Direction.DEMOTE)

    def batch(self, moves: Moves, direction: Direction) -> Batch:
        """The shape of a transfer, before writers are told apart. O(moves)."""
        counts = np.bincount(moves[:, 2], minlength=len(self._tables)).tolist()
        shapes = [
            (count * fragments, count * size)
            for count, (fragments, size) in zip(counts, self._sizes, strict=True)
        ]
        return Batch(direction, sum(each[0] for each in shapes), sum(each[1] for each in shapes))

    def _move(self, moves: Moves, direction: Direction) -> Route:
        check_moves(self._plan, moves)
        route = choose(self._tuning, self.batch(moves, direction), self._reach)
        if route is Route.KERNEL and self._kernel is not None:
            self._kernel.run(moves, direction)
        else:
            flat = unroll(self._plan, self._tables, moves, direction)
            # Host pages are not written while they are promoted; KV pages are live, so demotion keeps stream order.
            self._copy(flat.sources, flat.targets, flat.sizes, direction is Direction.PROMOTE)
        return route


def is_nvidia(device: torch.device) -> bool:
    """Whether the device is a GPU of NVIDIA's: torch calls AMD's "cuda" as well."""
    return device.type == "cuda" and torch.version.cuda is not None


def _reach(device: torch.device, host_is_pinned: bool) -> Reach:
    return Reach(device.type == "cpu", is_nvidia(device) and host_is_pinned)


def _copy_for(device: torch.device) -> BatchCopy:
    if device.type == "cpu":
        return copy_on_host
    if is_nvidia(device):
        return DriverCopy()
    raise PlanRefused(f"no copy of our own reaches {device}: give a batch_copy")


def _kernel(plan: PagePlan, tuning: Tuning) -> PageKernel:
    from .launch import PageKernel  # noqa: PLC0415 - Triton is needed on CUDA only

    kernel = PageKernel(plan, tuning.programs)
    kernel.warm_up()
    return kernel


class DescriptorCopy:
    """A BatchCopy that picks kernel or driver per batch."""

    def __init__(
        self,
        direction: Direction,
        device: torch.device,
        tuning: Tuning | None = None,
        *,
        host_is_pinned: bool,
        batch_copy: BatchCopy | None = None,
    ) -> None:
        """`host_is_pinned`: whether the GPU may touch the host addresses that will be given."""
        self._direction = direction
        self._device = device
        self._tuning = tuning or load_tuning()
        self._reach = _reach(device, host_is_pinned)
        self._copy = batch_copy or _copy_for(device)

    def warm_up(self, largest_bytes: int) -> None:
        """Compiles the kernel for batches whose largest copy has this size, so that no request waits for it."""
        if self._reach.kernel_reaches_host:
            from .launch import warm_up_descriptors  # noqa: PLC0415 - Triton is needed on CUDA only

            warm_up_descriptors(self._device, largest_bytes)

    def __call__(
        self,
        src_ptrs: torch.Tensor,
        dst_ptrs: torch.Tensor,
        sizes: torch.Tensor,
        is_src_access_order_any: bool = False,
    ) -> None:
        """Enqueues the copies on the current stream; on the CPU they are done on return."""
        flat = Descriptors(src_ptrs, dst_ptrs, sizes)
        batch = Batch(self._direction, len(flat), flat.total_bytes)
        if choose(self._tuning, batch, self._reach) is Route.KERNEL:
            from .launch import copy_with_kernel  # noqa: PLC0415 - Triton is needed on CUDA only

            copy_with_kernel(flat, self._device, self._tuning.programs)
        else:
            self._copy(src_ptrs, dst_ptrs, sizes, is_src_access_order_any)
