# SPDX-License-Identifier: Apache-2.0
"""Kernel or driver: thresholds from a file, and thresholds from measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.direction import Direction
from gpu_ops.dispatch import (
    DEFAULT_TUNING,
    Batch,
    Crossover,
    Measurement,
    Reach,
    Route,
    Tuning,
    choose,
    crossovers_from,
    dump_tuning,
    load_tuning,
)
from gpu_ops.errors import PlanRefused

KIB = 1024
PINNED = Reach(device_is_cpu=False, kernel_reaches_host=True)
TUNING = Tuning("a test", 12, (Crossover(2 * KIB, 128), Crossover(24 * KIB, 32)), (Crossover(KIB, 64),))


def batch(bytes_each: int, descriptors: int, direction: Direction = Direction.PROMOTE) -> Batch:
    return Batch(direction, descriptors, bytes_each * descriptors)


@pytest.mark.parametrize(
    ("bytes_each", "descriptors", "route"),
    [
        (2 * KIB, 127, Route.DRIVER),
        (2 * KIB, 128, Route.KERNEL),
        (2 * KIB + 1, 128, Route.KERNEL),
        (2 * KIB + 1, 32, Route.KERNEL),
        (2 * KIB + 1, 31, Route.DRIVER),
        (24 * KIB, 32, Route.KERNEL),
        (24 * KIB + 1, 100_000, Route.DRIVER),
        (0, 0, Route.DRIVER),
    ],
)
def test_promotion_takes_the_kernel_where_it_was_measured_to_win(
    bytes_each: int, descriptors: int, route: Route
) -> None:
    assert choose(TUNING, batch(bytes_each, descriptors), PINNED) is route


def test_demotion_has_thresholds_of_its_own() -> None:
    assert choose(TUNING, batch(KIB, 64, Direction.DEMOTE), PINNED) is Route.KERNEL
    assert choose(TUNING, batch(2 * KIB, 500, Direction.DEMOTE), PINNED) is Route.DRIVER


def test_fragments_decide_and_not_the_page_they_make() -> None:
    """A 32 KiB page of 256-byte fragments is small copies, whatever its own size."""
    assert choose(TUNING, Batch(Direction.PROMOTE, 128 * 50, 32 * KIB * 50), PINNED) is Route.KERNEL


def test_one_large_page_does_not_take_the_small_ones_with_it() -> None:
    mixed = Batch(Direction.PROMOTE, 1001, 1000 * 4 * KIB + KIB * KIB)
    assert choose(TUNING, mixed, PINNED) is Route.KERNEL


def test_no_kernel_touches_host_memory_that_is_not_pinned() -> None:
    assert (
        choose(TUNING, batch(4 * KIB, 10_000), Reach(device_is_cpu=False, kernel_reaches_host=False))
        is Route.DRIVER
    )


def test_without_a_gpu_the_host_copies() -> None:
    assert (
        choose(TUNING, batch(4 * KIB, 10_000), Reach(device_is_cpu=True, kernel_reaches_host=False))
        is Route.HOST
    )


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(0, 10**5))
def test_more_descriptors_never_bring_the_driver_back(size: int, few: int, more: int) -> None:
    if choose(TUNING, batch(size, few), PINNED) is Route.KERNEL:
        assert choose(TUNING, batch(size, few + more), PINNED) is Route.KERNEL


def test_the_shipped_tuning_agrees_with_what_vllm_measured() -> None:
    """vLLM 0.32: kernel below 28 KiB from 16 descriptors on, driver above; stores by the driver."""
    tuning = load_tuning()
    assert tuning.programs == 12
    for bytes_each in (KIB, 8 * KIB, 16 * KIB, 28 * KIB - 1):
        assert choose(tuning, batch(bytes_each, 15), PINNED) is Route.DRIVER
        assert choose(tuning, batch(bytes_each, 256), PINNED) is Route.KERNEL
    assert choose(tuning, batch(28 * KIB, 100_000), PINNED) is Route.DRIVER
    for bytes_each in (4 * KIB, 28 * KIB):
        assert choose(tuning, batch(bytes_each, 4096, Direction.DEMOTE), PINNED) is Route.DRIVER
    assert "not ours" in tuning.source, "a file that claims measurements of our kernel must have them"


def measured(rows: dict[int, dict[int, float]]) -> list[Measurement]:
    """From {bytes: {descriptors: driver seconds / kernel seconds}}."""
    return [
        Measurement(size, count, 1.0, ratio)
        for size, ratios in rows.items()
        for count, ratio in ratios.items()
    ]


def test_thresholds_follow_from_measurements() -> None:
    """The A30 rows of vLLM's issue 57555: driver time over kernel time."""
    rows = {
        1 * KIB: {16: 0.49, 32: 0.66, 64: 0.92, 128: 1.36, 256: 2.02, 1024: 3.43, 4096: 4.23},
        4 * KIB: {16: 0.57, 32: 0.81, 64: 1.19, 128: 1.80, 256: 2.68, 1024: 4.17, 4096: 4.47},
        8 * KIB: {16: 0.68, 32: 0.99, 64: 1.48, 128: 2.20, 256: 3.09, 1024: 3.73, 4096: 4.17},
        16 * KIB: {16: 0.86, 32: 1.20, 64: 1.81, 128: 2.49, 256: 2.99, 1024: 3.24, 4096: 3.73},
        24 * KIB: {16: 0.99, 32: 1.44, 64: 1.82, 128: 2.44, 256: 2.60, 1024: 3.02, 4096: 3.56},
    }
    assert crossovers_from(measured(rows)) == (
        Crossover(KIB, 128),
        Crossover(8 * KIB, 64),
        Crossover(24 * KIB, 32),
    )


def test_a_size_that_the_driver_wins_ends_the_kernel_s_range() -> None:
    rows = {KIB: {16: 2.0, 64: 3.0}, 8 * KIB: {16: 2.0, 64: 0.9}, 16 * KIB: {16: 2.0, 64: 2.0}}
    assert crossovers_from(measured(rows)) == (Crossover(KIB, 16),)
    assert crossovers_from([]) == ()


def test_a_tuning_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(dump_tuning(TUNING))
    assert load_tuning(file) == TUNING


@pytest.mark.parametrize(
    "change",
    [
        {"programs": 0},
        {"programs": None},
        {"promote": [{"up_to_bytes": 2, "from_descriptors": 1}, {"up_to_bytes": 2, "from_descriptors": 1}]},
        {"demote": [{"up_to_bytes": 2, "from_descriptors": 0}]},
        {"demote": [{"up_to_bytes": 2}]},
    ],
)
def test_a_file_that_is_no_tuning_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(json.dumps(json.loads(DEFAULT_TUNING.read_text()) | change))
    with pytest.raises(PlanRefused):
        load_tuning(file)
    file.write_text("{")
    with pytest.raises(PlanRefused, match="not a tuning"):
        load_tuning(file)
