# SPDX-License-Identifier: Apache-2.0
"""Flat descriptors by the kernel, in Triton's interpreter, against memory moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_ops import launch
from gpu_ops.descriptors import Descriptors
from gpu_ops.direction import Direction
from gpu_ops.driver import copy_on_host
from gpu_ops.mover import DescriptorCopy

CPU = torch.device("cpu")

# (bytes, source gap, target gap), in units of a width of its own
COPIES = st.lists(
    st.tuples(st.sampled_from([16, 16, 8, 4, 1]), st.integers(1, 200), st.integers(0, 3), st.integers(0, 3)),
    min_size=1,
    max_size=40,
)


def laid_out(copies: list[tuple[int, int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, Descriptors]:
    """A random source, a poisoned target, and descriptors that overlap nowhere in it."""
    rows, source, target = [], 0, 0
    for width, words, source_gap, target_gap in copies:
        source = -(-source // width) * width + source_gap * width
        target = -(-target // width) * width + target_gap * width
        rows.append((source, target, words * width))
        source, target = source + words * width, target + words * width
    random = torch.Generator().manual_seed(source)
    of = torch.randint(-128, 128, (source + 16,), dtype=torch.int8, generator=random)
    to = torch.full((target + 16,), 0x5A, dtype=torch.int8)
    columns = torch.tensor(rows, dtype=torch.int64).T
    return (
        of,
        to,
        Descriptors(columns[0] + of.data_ptr(), columns[1] + to.data_ptr(), columns[2].contiguous()),
    )


@given(copies=COPIES, programs=st.integers(1, 4))
@settings(max_examples=60)
def test_the_kernel_equals_memory_moves(copies: list[tuple[int, int, int, int]], programs: int) -> None:
    of, to, flat = laid_out(copies)
    poisoned, before = to.clone(), of.clone()
    launch.copy_with_kernel(flat, CPU, programs)
    by_kernel = to.clone()
    to.copy_(poisoned)
    copy_on_host(flat.sources, flat.targets, flat.sizes)
    assert torch.equal(by_kernel, to)
    assert torch.equal(of, before)


def test_copies_larger_than_a_tile_are_whole() -> None:
    of, to, flat = laid_out([(16, 5000, 0, 1), (16, 3, 1, 1), (4, 9001, 0, 0)])
    launch.copy_with_kernel(flat, CPU, 2)
    for source, target, size in zip(flat.sources, flat.targets, flat.sizes, strict=True):
        at, start = int(target) - to.data_ptr(), int(source) - of.data_ptr()
        assert torch.equal(to[at : at + int(size)], of[start : start + int(size)])


def test_every_copy_has_the_widest_access_its_addresses_allow() -> None:
    _, _, flat = laid_out([(16, 4, 0, 0), (4, 3, 0, 0), (1, 3, 0, 0), (16, 8, 0, 0)])
    widths = {unit: part.sizes.tolist() for unit, part in launch.by_access_width(flat)}
    assert widths == {16: [64, 128], 4: [12], 1: [3]}


def test_copies_that_are_all_aligned_are_not_taken_apart() -> None:
    _, _, flat = laid_out([(16, 4, 0, 0)] * 3)
    ((unit, part),) = launch.by_access_width(flat)
    assert unit == 16
    assert part is flat


def test_no_copies_are_no_launch_and_warming_up_copies_nothing() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    launch.copy_with_kernel(Descriptors(empty, empty, empty), CPU, 1)
    launch.warm_up_descriptors(CPU, 16384)


def test_copies_too_many_for_one_launch_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    of, to, flat = laid_out([(16, 4, 0, 0)] * 30)
    monkeypatch.setattr(launch, "MAX_PIECES", 7)
    launch.copy_with_kernel(flat, CPU, 2)
    assert torch.equal(to[: 30 * 64], of[: 30 * 64])


def test_on_the_cpu_descriptors_are_copied_by_the_host() -> None:
    of, to, flat = laid_out([(16, 4, 0, 0)] * 3)
    copy = DescriptorCopy(Direction.PROMOTE, CPU, host_is_pinned=False)
    copy(flat.sources, flat.targets, flat.sizes, is_src_access_order_any=True)
    assert torch.equal(to[: 3 * 64], of[: 3 * 64])
