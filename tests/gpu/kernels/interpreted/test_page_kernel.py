# SPDX-License-Identifier: Apache-2.0
"""Promotion and demotion by the kernel, in Triton's interpreter, against the plain reference.

Every test compares whole buffers, so that a byte written beside its page counts as much as a byte not written.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from gpu_ops import launch, reference
from gpu_ops.descriptors import fragment_tables, unroll
from gpu_ops.direction import Direction
from gpu_ops.dispatch import Crossover, Reach, Route, Tuning
from gpu_ops.driver import copy_on_host
from gpu_ops.errors import PlanRefused
from gpu_ops.mover import PageMover
from gpu_ops.moves import page_moves
from gpu_ops.plan import PagePlan, Segment
from gpu_ops.runs import CopyRun, whole_page

from .plans import Case, cases, random_rows

REFERENCES = {Direction.PROMOTE: reference.promote, Direction.DEMOTE: reference.demote}
BOTH = pytest.mark.parametrize("direction", Direction)


def expected(case: Case, direction: Direction) -> list[torch.Tensor]:
    plan, buffers = case.fresh()
    REFERENCES[direction](plan, case.moves)
    return buffers


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@BOTH
@given(case=cases())
@settings(max_examples=60)
def test_the_kernel_equals_the_reference(direction: Direction, case: Case) -> None:
    plan, buffers = case.fresh()
    launch.PageKernel(plan, programs=3).run(case.moves, direction)
    assert same(buffers, expected(case, direction))


@BOTH
@given(case=cases())
@settings(max_examples=60)
def test_descriptors_copied_by_the_host_equal_the_reference(direction: Direction, case: Case) -> None:
    plan, buffers = case.fresh()
    flat = unroll(plan, fragment_tables(plan), case.moves, direction)
    copy_on_host(flat.sources, flat.targets, flat.sizes)
    assert same(buffers, expected(case, direction))


@BOTH
@given(case=cases())
@settings(max_examples=15)
def test_the_mover_equals_the_reference_on_a_machine_without_a_gpu(direction: Direction, case: Case) -> None:
    plan, buffers = case.fresh()
    mover = PageMover(plan)
    route = mover.promote(case.moves) if direction is Direction.PROMOTE else mover.demote(case.moves)
    assert route is Route.HOST
    assert same(buffers, expected(case, direction))


@given(case=cases())
@settings(max_examples=15)
def test_demoting_what_was_promoted_changes_nothing(case: Case) -> None:
    plan, buffers = case.fresh()
    everyone_writes = tuple(
        tuple(Segment(one.host_tensor, one.device_tensor, one.run) for one in segments)
        for segments in plan.sets
    )
    kernel = launch.PageKernel(PagePlan(plan.host, plan.device, plan.pages_per_chunk, everyone_writes), 2)
    kernel.run(case.moves, Direction.PROMOTE)
    promoted = [buffer.clone() for buffer in buffers]
    kernel.run(case.moves, Direction.DEMOTE)
    assert same(buffers, promoted)


def large_case(pages: int, page_bytes: int, run: CopyRun, host_page_bytes: int) -> Case:
    host = random_rows(pages, host_page_bytes, 0, 0, seed=1)
    device = random_rows(pages + 1, page_bytes, 0, 0, seed=2)
    moves = page_moves(range(pages), list(range(pages, 0, -1)))
    return Case((host,), (device,), 1, ((Segment(0, 0, run),),), moves)


@BOTH
@pytest.mark.parametrize(
    "case",
    [
        # pages of several tiles with a ragged end; many pages in one tile; fragments that straddle tiles
        large_case(3, 40_016, whole_page(40_016), 40_016),
        large_case(70, 512, whole_page(512), 512),
        large_case(2, 48_000, CopyRun(0, 48, 480, 100, 480, 1008), 101_008),
    ],
    ids=["several tiles", "several pages in a tile", "fragments across tiles"],
)
def test_pages_of_any_size_fill_tiles(direction: Direction, case: Case) -> None:
    plan, buffers = case.fresh()
    launch.PageKernel(plan, programs=2).run(case.moves, direction)
    assert same(buffers, expected(case, direction))


def test_a_layer_of_odd_pages_leaves_the_others_their_wide_accesses() -> None:
    even, odd = random_rows(2, 64, 0, 0, seed=1), random_rows(2, 30, 0, 0, seed=2)
    segments = (Segment(0, 0, whole_page(64)), Segment(1, 1, whole_page(30)))
    plan = PagePlan((even.rows, odd.rows), (even.copy().rows, odd.copy().rows), 1, (segments,))
    tables = launch.tile_tables(plan)
    assert [(table.shape.unit_bytes, len(table.places)) for table in tables] == [(16, 1), (1, 1)]


@pytest.mark.parametrize(
    ("changed", "unit"),
    [
        ({}, 16),
        ({"local_offset": 4}, 4),
        ({"canonical_offset": 2}, 1),
        ({"local_stride": 40}, 4),
        ({"canonical_stride": 33}, 1),
        ({"fragment_size": 28}, 4),
        ({"fragment_size": 28, "num_fragments": 1}, 4),
        ({"num_fragments": 1, "local_stride": 40, "canonical_stride": 33}, 16),
    ],
)
@pytest.mark.parametrize(("host_gap", "device_gap", "widest"), [(0, 0, 16), (8, 0, 4), (0, 3, 1)])
def test_accesses_are_as_wide_as_every_address_of_the_segment_allows(
    changed: dict[str, int], unit: int, host_gap: int, device_gap: int, widest: int
) -> None:
    """The interpreter takes any address, a GPU faults: the width itself is what is tested."""
    run = dataclasses.replace(CopyRun(0, 0, 32, 2, 32, 48), **changed)
    host, device = random_rows(3, 128, host_gap, 0, seed=1), random_rows(3, 96, device_gap, 0, seed=2)
    plan = PagePlan((host.rows,), (device.rows,), 1, ((Segment(0, 0, run),),))
    (table,) = launch.tile_tables(plan)
    assert table.shape.unit_bytes == min(unit, widest)


def test_whole_pages_are_copied_without_dividing_by_their_fragments() -> None:
    rows = random_rows(2, 64, 0, 0, seed=1)
    plan = PagePlan((rows.rows,), (rows.copy().rows,), 1, ((Segment(0, 0, whole_page(64)),),))
    assert not launch.tile_tables(plan)[0].strided


@pytest.mark.parametrize(
    ("largest", "items", "words"),
    [(1, 64, 16), (256, 64, 16), (257, 32, 32), (4096, 4, 256), (16384, 1, 1024), (10**6, 1, 1024)],
)
def test_a_tile_always_has_its_16_kib_in_flight(largest: int, items: int, words: int) -> None:
    shape = launch.tile_shape(16, largest)
    assert (shape.items, shape.words) == (items, words)
    assert shape.items * shape.words * shape.unit_bytes == 16 * 1024


def test_a_transfer_too_long_for_one_launch_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    case = large_case(70, 512, whole_page(512), 512)
    plan, buffers = case.fresh()
    monkeypatch.setattr(launch, "MAX_PIECES", 32)
    launch.PageKernel(plan, programs=2).run(case.moves, Direction.PROMOTE)
    assert same(buffers, expected(case, Direction.PROMOTE))


def test_warming_up_moves_nothing() -> None:
    case = large_case(3, 512, whole_page(512), 512)
    plan, buffers = case.fresh()
    before = [buffer.clone() for buffer in buffers]
    launch.PageKernel(plan, programs=12).warm_up()
    assert same(buffers, before)


def test_the_mover_gives_many_small_copies_to_the_kernel_and_the_rest_to_the_driver() -> None:
    """The routing of a mover on CUDA, with the interpreter as the GPU and a recorder as the driver."""
    case = large_case(70, 512, whole_page(512), 512)
    plan, buffers = case.fresh()
    orders: list[bool] = []

    def driver(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, any_order: bool = False) -> None:
        orders.append(any_order)
        copy_on_host(src, dst, sizes)

    tuning = Tuning("a test", 12, (Crossover(1024, 64),), (Crossover(1024, 64),))
    mover = PageMover(plan, tuning, batch_copy=driver)
    mover._reach = Reach(device_is_cpu=False, kernel_reaches_host=True)
    mover._kernel = launch.PageKernel(plan, tuning.programs)
    assert mover.promote(case.moves[:63]) is Route.DRIVER
    assert mover.promote(case.moves[6:]) is Route.KERNEL
    assert orders == [True], "host pages may be read out of stream order"
    assert same(buffers, expected(case, Direction.PROMOTE))
    assert mover.demote(case.moves[:1]) is Route.DRIVER
    assert orders == [True, False], "KV pages are live: they are read in stream order"


def test_a_device_that_is_no_nvidia_gpu_needs_a_copy_of_the_caller_s() -> None:
    """Not the host's: it would write to addresses of another memory."""
    rows = random_rows(2, 64, 0, 0, seed=1).rows
    elsewhere = torch.empty((2, 64), dtype=torch.int8, device="meta")
    plan = PagePlan((rows,), (elsewhere,), 1, ((Segment(0, 0, whole_page(64)),),))
    with pytest.raises(PlanRefused, match="meta"):
        PageMover(plan)
    taken: list[int] = []
    mover = PageMover(plan, batch_copy=lambda src, dst, sizes, any_order=False: taken.append(len(sizes)))
    assert mover.promote(page_moves([0, 1], [1, 0])) is Route.DRIVER
    assert taken == [2]


@pytest.mark.parametrize(
    "moves",
    [
        page_moves([3], [0]),
        page_moves([-1], [0]),
        page_moves([0], [4]),
        page_moves([0], [-1]),
        page_moves([0], [0], 1),
        np.zeros((1, 3), dtype=np.int64),
        np.zeros((1, 2), dtype=np.int32),
        torch.zeros((1, 3), dtype=torch.int32),
    ],
)
def test_moves_outside_the_plan_are_refused_before_any_byte_moves(moves: Any) -> None:
    case = large_case(3, 512, whole_page(512), 512)
    plan, buffers = case.fresh()
    before = [buffer.clone() for buffer in buffers]
    with pytest.raises(PlanRefused):
        PageMover(plan).promote(moves)
    assert same(buffers, before)


@pytest.mark.parametrize(
    "segment",
    [
        Segment(0, 0, CopyRun(0, 0, 65, 1, 65, 65)),
        Segment(0, 0, CopyRun(0, 1, 64, 1, 64, 64)),
        Segment(0, 0, CopyRun(0, 0, 16, 3, 16, 25)),
        Segment(0, 0, CopyRun(0, 0, 16, 2, 15, 16)),
        Segment(0, 0, CopyRun(-1, 0, 16, 1, 16, 16)),
        Segment(0, 0, CopyRun(0, 0, 0, 1, 16, 16)),
        Segment(1, 0, whole_page(64)),
        Segment(0, 1, whole_page(64)),
        Segment(0, 0, whole_page(64), num_writers=2, writer_index=2),
    ],
)
def test_segments_that_leave_their_pages_are_refused(segment: Segment) -> None:
    rows = random_rows(2, 64, 0, 0, seed=1).rows
    with pytest.raises(PlanRefused):
        PagePlan((rows,), (rows,), 1, ((segment,),))


def test_tensors_that_are_no_pages_are_refused() -> None:
    good = random_rows(2, 64, 0, 0, seed=1).rows
    for bad in (good.float(), good[0], good[:, ::2], good[:, :1].expand(2, 64)):
        with pytest.raises(PlanRefused):
            PagePlan((good,), (bad,), 1, ())
    with pytest.raises(PlanRefused, match="not 3 pages"):
        PagePlan((good,), (good,), 3, ())
    with pytest.raises(PlanRefused, match="at least 1"):
        PagePlan((good,), (good,), 0, ())
    with pytest.raises(PlanRefused, match="both sides"):
        PagePlan((good,), (), 1, ())
