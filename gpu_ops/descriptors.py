# SPDX-License-Identifier: Apache-2.0
"""Copy descriptors: a transfer as a flat list of (source address, target address, bytes).

This is the form that vLLM's workers hand to their copy engine (`ops.swap_blocks_batch`: three int64 CPU tensors), the
form that the driver's batched copy takes, and the form that decides between kernel and driver. A plan unrolls into
one descriptor per (move, fragment); the parts that do not depend on the moves are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .direction import Direction
from .geometry import SegmentGeometry, segment_geometry
from .moves import Moves
from .plan import PagePlan

Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Three int64 CPU tensors of one length; addresses are absolute. No two targets may overlap."""

    sources: torch.Tensor
    targets: torch.Tensor
    sizes: torch.Tensor

    def __len__(self) -> int:
        return int(self.sources.numel())

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class FragmentTable:
    """All fragments of one set, one entry each: int64 arrays (fragments,)."""

    host_base: Int64s
    host_chunk_stride: Int64s
    host_page_stride: Int64s
    device_base: Int64s
    device_page_stride: Int64s
    size_bytes: Int64s
    num_writers: Int64s
    writer_index: Int64s

    def __len__(self) -> int:
        return len(self.size_bytes)

    @property
    def total_bytes(self) -> int:
        """What one move copies."""
        return int(self.size_bytes.sum())


def fragment_tables(plan: PagePlan) -> tuple[FragmentTable, ...]:
    """One table per set. O(fragments)."""
    return tuple(_table([segment_geometry(plan, one) for one in segments]) for segments in plan.sets)


def _table(segments: list[SegmentGeometry]) -> FragmentTable:
    rows = [
        (
            one.host_base + index * one.host_stride,
            one.host_chunk_stride,
            one.host_page_stride,
            one.device_base + index * one.device_stride,
            one.device_page_stride,
            one.fragment_bytes,
            one.num_writers,
            one.writer_index,
        )
        for one in segments
        for index in range(one.fragments)
    ]
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(fields(FragmentTable)))
    return FragmentTable(*(column.copy() for column in columns.T))


def unroll(
    plan: PagePlan, tables: tuple[FragmentTable, ...], moves: Moves, direction: Direction
) -> Descriptors:
    """The descriptors of a transfer. O(moves * fragments of their sets), vectorised.

    `tables` are `fragment_tables(plan)`, `moves` as `check_moves` accepts them.
    """
    if len(tables) == 1:
        parts = [_unroll_set(plan, tables[0], moves, direction)]
    else:
        parts = [
            _unroll_set(plan, table, moves[moves[:, 2] == number], direction)
            for number, table in enumerate(tables)
        ]
    columns = parts[0] if len(parts) == 1 else [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Descriptors(*(torch.from_numpy(column) for column in columns))


def _unroll_set(
    plan: PagePlan, table: FragmentTable, moves: Moves, direction: Direction
) -> tuple[Int64s, Int64s, Int64s]:
    """Sources, targets and sizes, the fragments of a move side by side."""
    pages = moves.astype(np.int64)
    host_page = pages[:, 0, None]
    host = np.empty((len(pages), len(table)), dtype=np.int64)
    device = np.empty_like(host)
    if plan.pages_per_chunk == 1:
        np.multiply(host_page, table.host_chunk_stride, out=host)
    else:
        chunk, slot = np.divmod(host_page, plan.pages_per_chunk)
        np.multiply(chunk, table.host_chunk_stride, out=host)
        host += slot * table.host_page_stride
    host += table.host_base
    np.multiply(pages[:, 1, None], table.device_page_stride, out=device)
    device += table.device_base
    sizes = np.empty_like(host)
    sizes[:] = table.size_bytes
    if direction is Direction.PROMOTE:
        return host.reshape(-1), device.reshape(-1), sizes.reshape(-1)
    if not (table.num_writers > 1).any():
        return device.reshape(-1), host.reshape(-1), sizes.reshape(-1)
    written = host_page % table.num_writers == table.writer_index
    return device[written], host[written], sizes[written]
