# SPDX-License-Identifier: Apache-2.0
"""Tables and verdicts of the GPU benchmark, from figures made up here."""

from __future__ import annotations

import pytest

from gpu_ops.bench import Report
from gpu_ops.benchmark.report import Row, table, verdicts

KIB, MIB = 2**10, 2**20


def row(total_bytes: int, **seconds: float) -> Row:
    return Row("promotion", total_bytes, 16 * KIB, total_bytes // (16 * KIB), seconds, {"route": "kernel"})


def test_promises_hold_at_their_bounds_and_not_beyond() -> None:
    good = [row(64 * MIB, contiguous=0.9, ours=1.0, vllm=1.0), row(MIB, contiguous=0.1, ours=1.05, vllm=1.0)]
    assert [holds for holds, _ in verdicts(good)] == [True, True]
    slow = [*good, row(128 * MIB, contiguous=0.89, ours=1.0, vllm=1.0)]
    assert [holds for holds, _ in verdicts(slow)] == [False, True]
    behind = [*good, row(8 * MIB, contiguous=0.1, ours=1.06, vllm=1.0)]
    assert [holds for holds, _ in verdicts(behind)] == [True, False]
    assert "8 MiB in fragments of 16 KiB" in verdicts(behind)[1][1]


def test_without_vllm_only_the_link_s_ceiling_is_judged() -> None:
    assert len(verdicts([row(64 * MIB, contiguous=1.0, ours=1.0)])) == 1
    assert verdicts([row(MIB, contiguous=1.0, ours=1.0)]) == []


def test_a_section_ends_when_its_share_of_the_time_has_passed(capsys: pytest.CaptureFixture[str]) -> None:
    left_s = iter([100.0, 90.0, 75.0, 50.0, 40.0])
    report = Report(lambda: next(left_s))
    report.section("Promotion", [row(total * MIB, ours=1.0) for total in range(1, 9)], share=0.5)
    assert [one.total_bytes for one in report.rows] == [MIB, 2 * MIB, 3 * MIB]
    assert "cut here" in capsys.readouterr().out
    Report(lambda: 100.0).section("Promotion", report.rows, share=0.5)
    assert "cut here" not in capsys.readouterr().out


def test_a_table_has_a_cell_for_everyone() -> None:
    lines = table([row(64 * MIB, contiguous=0.002, ours=0.0025), row(16 * KIB, ours=0.00002)]).splitlines()
    assert lines[0] == "| total | fragment | descriptors | contiguous | ours | route |"
    assert lines[2] == "| 64 MiB | 16 KiB | 4096 | 2.00 ms, 33.6 GB/s | 2.50 ms, 26.8 GB/s | kernel |"
    assert lines[3] == "| 16 KiB | 16 KiB | 1 | - | 20.0 us, 0.8 GB/s | kernel |"
