# SPDX-License-Identifier: Apache-2.0
"""Before anything is timed: every way to move pages gives the reference's bytes, and touches no others.

Targets are poisoned, whole buffers are compared, and the sources are random bytes, so a comparison says more than one
of floating-point values with a tolerance would: any bit that differs fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpu_ops import reference
from gpu_ops.descriptors import Descriptors, fragment_tables, unroll
from gpu_ops.direction import Direction
from gpu_ops.errors import GpuOpsError
from gpu_ops.launch import PageKernel, copy_with_kernel
from gpu_ops.moves import Moves, page_moves
from gpu_ops.plan import PagePlan, Segment
from gpu_ops.runs import CopyRun, whole_page

from .machine import Machine

POISON = 0x5A
PAGES_PER_CHUNK = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Pages of one layer: how they are copied, and how far from alignment their rows begin."""

    name: str
    run: CopyRun
    host_page_bytes: int
    device_page_bytes: int
    first_byte: int = 0


LAYOUTS = (
    Layout("whole pages", whole_page(32768), 32768, 32768),
    Layout("small pages", whole_page(256), 256, 256),
    Layout("pages of several tiles, padded on the device", whole_page(40016), 40016, 40960),
    Layout("a shard of token-major pages", CopyRun(0, 512, 256, 64, 256, 2048), 131072, 16384),
    Layout("fragments across tiles", CopyRun(16, 48, 480, 100, 496, 1008), 101008, 49616),
    Layout("pages of four-byte words", whole_page(1348), 1348, 1348, first_byte=4),
    Layout("odd pages", CopyRun(3, 1, 37, 11, 40, 39), 433, 441, first_byte=7),
)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """A buffer and the rows inside it."""

    buffer: torch.Tensor
    rows: torch.Tensor


def checks(machine: Machine) -> Iterator[str]:
    """Runs every check and yields its name. Raises GpuOpsError at the first byte that differs."""
    for layout in LAYOUTS:
        for direction in Direction:
            for name, move in _ways(machine, direction):
                _check(machine, layout, direction, name, move)
                yield f"{direction.value}, {name}: {layout.name}"


Move = Callable[[PagePlan, Moves], None]


def _ways(machine: Machine, direction: Direction) -> Iterator[tuple[str, Move]]:
    def flat(plan: PagePlan, moves: Moves) -> Descriptors:
        return unroll(plan, fragment_tables(plan), moves, direction)

    def by_driver(plan: PagePlan, moves: Moves) -> None:
        copies = flat(plan, moves)
        machine.batch_copy(copies.sources, copies.targets, copies.sizes, direction is Direction.PROMOTE)

    yield "page kernel", lambda plan, moves: PageKernel(plan, 12).run(moves, direction)
    yield "descriptor kernel", lambda plan, moves: copy_with_kernel(flat(plan, moves), machine.device, 12)
    yield "driver", by_driver


def _check(machine: Machine, layout: Layout, direction: Direction, name: str, move: Move) -> None:
    pages = 6
    host = _side(
        machine.host_bytes, layout.host_page_bytes * PAGES_PER_CHUNK, pages // PAGES_PER_CHUNK, layout
    )
    device = _side(machine.device_bytes, layout.device_page_bytes, pages + 1, layout)
    source, target = (host, device) if direction is Direction.PROMOTE else (device, host)
    random = torch.Generator().manual_seed(layout.host_page_bytes)
    source.buffer.copy_(torch.randint(-128, 128, source.buffer.shape, dtype=torch.int8, generator=random))
    target.buffer.fill_(POISON)
    # Demotion as one of two writers: the other one's pages keep their poison.
    sets = ((Segment(0, 0, layout.run, num_writers=2, writer_index=1),),)
    moves = page_moves(range(pages), torch.randperm(pages + 1, generator=random)[:pages].tolist())

    on_cpu = [Side(one.buffer.cpu().clone(), one.rows) for one in (host, device)]
    rows = [
        one.buffer.as_strided(one.rows.shape, one.rows.stride(), one.rows.storage_offset()) for one in on_cpu
    ]
    expect = reference.promote if direction is Direction.PROMOTE else reference.demote
    expect(PagePlan((rows[0],), (rows[1],), PAGES_PER_CHUNK, sets), moves)

    machine.finish()
    plan = PagePlan((host.rows,), (device.rows,), PAGES_PER_CHUNK, sets)
    machine.run(lambda: move(plan, moves))
    for side, expected in zip((host, device), on_cpu, strict=True):
        if not torch.equal(side.buffer.cpu(), expected.buffer):
            wrong = int((side.buffer.cpu() != expected.buffer).sum())
            raise GpuOpsError(f"{direction.value} by the {name} of {layout.name}: {wrong} bytes differ")


def _side(allocate: Callable[[int], torch.Tensor], row_bytes: int, count: int, layout: Layout) -> Side:
    buffer = allocate(layout.first_byte + row_bytes * count + 16)
    return Side(buffer, buffer.as_strided((count, row_bytes), (row_bytes, 1), layout.first_byte))
