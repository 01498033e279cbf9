# SPDX-License-Identifier: Apache-2.0
"""Settings, regions, pacing."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from engine_ext.transfer.config import TransferConfig
from engine_ext.transfer.errors import TransferConfigError
from engine_ext.transfer.pacing import Pacing
from engine_ext.transfer.region import HostRegion, Region


def test_defaults_are_usable() -> None:
    assert TransferConfig.load({}) == TransferConfig().check()
    assert TransferConfig().backends == ("UCX",)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"backends": []}, "backends"),
        ({"backends": ["UCX", "UCX"]}, "backends"),
        ({"backend_options": {"POSIX": {}}}, "backend_options"),
        ({"part_bytes": 0}, "part_bytes"),
        ({"depth": 0}, "depth"),
        ({"longest_poll_s": 1e-6}, "longest_poll_s"),
        ({"settle_s": -1}, "settle_s"),
        ({"progress_interval_s": 0}, "progress_interval_s"),
        ({"deptth": 3}, "transfer"),
        ({"depth": "four"}, "transfer"),
    ],
)
def test_a_bad_setting_is_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(TransferConfigError) as refused:
        TransferConfig.load(options)
    assert refused.value.field == field


def test_a_region_is_the_buffer_and_keeps_it_in_place() -> None:
    buffer = mmap.mmap(-1, 4 * 4096)
    host = HostRegion(memoryview(buffer), 4096)
    assert (host.region.blocks, host.region.size_bytes) == (4, 4 * 4096)
    ctypes.memset(host.region.base_address + 2 * 4096, 0x55, 4096)
    assert buffer[2 * 4096 - 1 : 2 * 4096 + 1] == b"\x00\x55"
    with pytest.raises(BufferError):
        buffer.close()
    host.release()
    buffer.close()


def test_a_buffer_of_rows_is_a_region_too() -> None:
    rows = memoryview(bytearray(6 * 512)).cast("B", (6, 512))
    assert HostRegion(rows, 512).region.blocks == 6


def test_blocks_must_fill_the_buffer() -> None:
    with pytest.raises(TransferConfigError, match="divisor"):
        HostRegion(memoryview(bytearray(1000)), 300)


def test_a_region_knows_its_blocks() -> None:
    region = Region(4096, 512, 10)
    assert region.holds([])
    assert region.holds([0, 9])
    assert not region.holds([0, 10])
    assert not region.holds([-1])


def test_pauses_grow_to_their_bound_and_start_anew_when_something_moves() -> None:
    pacing = Pacing(first_s=1e-5, longest_s=1e-4)
    pauses = []
    for _ in range(6):
        pacing.rested()
        pauses.append(pacing.pause_s)
    assert pauses == pytest.approx([1e-5, 2e-5, 4e-5, 8e-5, 1e-4, 1e-4])
    pacing.moved()
    assert pacing.pause_s == 0.0
