# SPDX-License-Identifier: Apache-2.0
"""The benchmark script, rehearsed on the CPU: everything but CUDA itself runs before a GPU is ever lent to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_ops import bench
from gpu_ops.benchmark import correctness
from gpu_ops.benchmark.machine import Rehearsal
from gpu_ops.benchmark.sections import MEASURED
from gpu_ops.dispatch import load_tuning
from gpu_ops.driver import copy_on_host
from gpu_ops.errors import GpuOpsError


def test_a_rehearsal_goes_through_every_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, tuning = tmp_path / "rows.json", tmp_path / "tuning.json"
    assert bench.main(["--rehearse", "--json", str(rows), "--write-tuning", str(tuning)]) == 0
    said = capsys.readouterr().out
    assert "REHEARSAL" in said
    assert "correct: 42 checks" in said
    for title in (
        "Promotion",
        "Shards",
        "Launch width",
        "Crossovers, promote",
        "Demotion",
        "Beside a matrix",
    ):
        assert f"\n## {title}" in said
    assert "cut here" not in said
    sections = {row["section"] for row in json.loads(rows.read_text())}
    assert {"promotion", "demotion", "launch width", "crossover, demote", "shards, promote"} <= sections
    assert load_tuning(tuning).source.startswith("gpu_ops.bench on REHEARSAL")


def test_checks_fail_where_a_copy_leaves_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Rehearsal()

    def one_byte_more(src, dst, sizes, _=False):  # type: ignore[no-untyped-def]
        sizes = sizes.clone()
        sizes[-1] += 1
        copy_on_host(src, dst, sizes)

    machine.batch_copy = one_byte_more
    with pytest.raises(GpuOpsError, match=r"by the driver .* bytes differ"):
        list(correctness.checks(machine))


def test_every_size_of_the_promise_is_measured() -> None:
    assert MEASURED.totals[0] == 8 * 2**10
    assert MEASURED.totals[-1] == 2**30
    assert all(
        later == 2 * earlier for earlier, later in zip(MEASURED.totals, MEASURED.totals[1:], strict=False)
    )
