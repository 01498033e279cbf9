# SPDX-License-Identifier: Apache-2.0
"""Launching the kernels: tables for a plan, tile shapes, grids.

A plan's segments are cut into tiles of at most TILE_WORDS words once; the tables live on the device. A transfer then
uploads only its moves, 12 bytes each, and launches once per access width (16, 4, 1 bytes) that the plan needs: once,
in every plan whose pages are multiples of 16 bytes.

Works on CUDA devices, and on CPU tensors where TRITON_INTERPRET=1 was set before the first import of Triton.
Everything is enqueued on the current CUDA stream. Buffers of a call may be dropped when it returns: torch's caching
allocators, pinned and device, hand memory out again only behind the stream's work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from . import kernels
from .descriptors import Descriptors
from .direction import Direction
from .geometry import SegmentGeometry, segment_geometry
from .moves import Moves
from .plan import MAX_PAGE_BYTES, PagePlan

# One tile: 16 KiB of 16-byte words in flight per program, four words for each of the 256 threads of 8 warps.
TILE_WORDS = 1024
NUM_WARPS = 8
# A piece is never narrower than this, so that a warp's access covers whole 128-byte lines.
MIN_WORDS = 16
# Pieces are numbered in 32 bits; the rest is room for a grid's step behind the last one.
MAX_PIECES = 2**30


@dataclass(frozen=True, slots=True)
class TileShape:
    """ITEMS pieces of WORDS words, a tile of TILE_WORDS words."""

    unit_bytes: int
    items: int
    words: int

    @property
    def piece_bytes(self) -> int:
        return self.words * self.unit_bytes


def tile_shape(unit_bytes: int, largest_bytes: int) -> TileShape:
    """The shape for payloads of up to `largest_bytes`: as many pieces at once as fill a tile."""
    words = MIN_WORDS
    while words < TILE_WORDS and words * unit_bytes < largest_bytes:
        words *= 2
    return TileShape(unit_bytes, TILE_WORDS // words, words)


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """The segments of one access width, cut into tiles, as `kernels.move_pages` reads them."""

    shape: TileShape
    strided: bool
    tiles_per_move: int
    sets: torch.Tensor
    places: torch.Tensor
    shapes: torch.Tensor


def tile_tables(plan: PagePlan) -> list[TileTable]:
    """One table per access width in use, on the plan's device. O(tiles)."""
    sets = [[segment_geometry(plan, one) for one in segments] for segments in plan.sets]
    tables = []
    for unit in (16, 4, 1):
        of_width = [[one for one in segments if one.unit_bytes == unit] for segments in sets]
        if any(of_width):
            tables.append(_tile_table(of_width, unit, plan.target))
    return tables


def _tile_table(
    sets: Sequence[Sequence[SegmentGeometry]], unit_bytes: int, device: torch.device
) -> TileTable:
    everything = [one for segments in sets for one in segments]
    shape = tile_shape(unit_bytes, max(one.payload_bytes for one in everything))
    spans: list[tuple[int, int]] = []
    places: list[tuple[int, ...]] = []
    shapes: list[tuple[int, ...]] = []
    for segments in sets:
        first_tile = len(places)
        for one in segments:
            for first_byte in range(0, one.payload_bytes, shape.piece_bytes):
                places.append((one.host_base, one.host_chunk_stride, one.device_base, one.device_page_stride))
                shapes.append(_shape_row(one, first_byte))
        spans.append((first_tile, len(places) - first_tile))
    return TileTable(
        shape=shape,
        strided=any(one.fragments > 1 for one in everything),
        tiles_per_move=max(tiles for _, tiles in spans),
        sets=torch.tensor(spans, dtype=torch.int32, device=device),
        places=torch.tensor(places, dtype=torch.int64, device=device),
        shapes=torch.tensor(shapes, dtype=torch.int32, device=device),
    )


def _shape_row(one: SegmentGeometry, first_byte: int) -> tuple[int, ...]:
    return (
        one.host_page_stride,
        one.host_stride,
        one.device_stride,
        one.fragment_bytes,
        one.payload_bytes,
        first_byte,
        one.num_writers,
        one.writer_index,
    )


class PageKernel:
    """`kernels.move_pages` for one plan. The plan's host tensors must be readable by the device: pinned."""

    def __init__(self, plan: PagePlan, programs: int) -> None:
        """`programs` bounds the launch: each takes one SM while it runs."""
        self._plan = plan
        self._programs = programs
        self._tables = tile_tables(plan)

    def run(self, moves: Moves, direction: Direction) -> None:
        """Enqueues the transfer. `moves` as `check_moves` accepts them."""
        if not len(moves):
            return
        with _on(self._plan.target):
            on_device = _uploaded(torch.from_numpy(moves), self._plan.target)
            for table in self._tables:
                most = max(1, MAX_PIECES // table.tiles_per_move)
                for first in range(0, len(moves), most):
                    self._launch(table, on_device[first : first + most], direction)

    def warm_up(self) -> None:
        """Compiles and loads what `run` will need, so that no request waits for it. Moves nothing."""
        with _on(self._plan.target):
            nothing = torch.zeros((0, 3), dtype=torch.int32, device=self._plan.target)
            for table in self._tables:
                for direction in Direction:
                    self._launch(table, nothing, direction)

    def _launch(self, table: TileTable, moves: torch.Tensor, direction: Direction) -> None:
        shape = table.shape
        grid = (_grid(len(moves) * table.tiles_per_move, shape, self._programs),)
        kernels.move_pages[grid](
            moves,
            table.sets,
            table.places,
            table.shapes,
            len(moves),
            table.tiles_per_move,
            self._plan.pages_per_chunk,
            PROMOTE=direction is Direction.PROMOTE,
            UNIT=shape.unit_bytes,
            ITEMS=shape.items,
            WORDS=shape.words,
            STRIDED=table.strided,
            num_warps=NUM_WARPS,
        )


def copy_with_kernel(descriptors: Descriptors, device: torch.device, programs: int) -> None:
    """Enqueues `kernels.copy_descriptors`. O(descriptors * tiles of the largest)."""
    with _on(device):
        for unit_bytes, part in by_access_width(descriptors):
            largest = int(part.sizes.max())
            shape = tile_shape(unit_bytes, largest)
            tiles = -(-largest // shape.piece_bytes)
            for piece in _split(part, max(1, MAX_PIECES // tiles)):
                columns = torch.stack((piece.sources, piece.targets, piece.sizes))
                _launch_descriptors(_uploaded(columns, device), tiles, shape, programs)


def warm_up_descriptors(device: torch.device, largest_bytes: int) -> None:
    """Compiles and loads what `copy_with_kernel` needs for aligned batches with this largest copy."""
    with _on(device):
        nothing = torch.zeros((3, 0), dtype=torch.int64, device=device)
        _launch_descriptors(nothing, 1, tile_shape(16, largest_bytes), 1)


def _launch_descriptors(columns: torch.Tensor, tiles: int, shape: TileShape, programs: int) -> None:
    count = int(columns.shape[1])
    kernels.copy_descriptors[(_grid(count * tiles, shape, programs),)](
        columns,
        count,
        tiles,
        UNIT=shape.unit_bytes,
        ITEMS=shape.items,
        WORDS=shape.words,
        num_warps=NUM_WARPS,
    )


def by_access_width(descriptors: Descriptors) -> Iterator[tuple[int, Descriptors]]:
    """The descriptors by the widest access they allow; (16, all of them) where all are multiples of 16."""
    if not len(descriptors):
        return
    if int(descriptors.sizes.max()) > MAX_PAGE_BYTES:
        raise ValueError(f"a descriptor of {int(descriptors.sizes.max())} bytes, more than {MAX_PAGE_BYTES}")
    mixed = descriptors.sources | descriptors.targets | descriptors.sizes
    left = torch.ones_like(mixed, dtype=torch.bool)
    for unit in (16, 4, 1):
        fits = left & (mixed % unit == 0)
        if bool(fits.all()):
            yield unit, descriptors
            return
        if bool(fits.any()):
            yield (
                unit,
                Descriptors(descriptors.sources[fits], descriptors.targets[fits], descriptors.sizes[fits]),
            )
        left &= ~fits


def _split(descriptors: Descriptors, most: int) -> Iterator[Descriptors]:
    for first in range(0, len(descriptors), most):
        part = slice(first, first + most)
        yield Descriptors(descriptors.sources[part], descriptors.targets[part], descriptors.sizes[part])


def _grid(pieces: int, shape: TileShape, programs: int) -> int:
    return max(1, min(programs, -(-pieces // shape.items)))


def _uploaded(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The table on the device, by way of pinned memory so that the caller need not wait."""
    if device.type != "cuda":
        return table
    return table.contiguous().pin_memory().to(device, non_blocking=True)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
