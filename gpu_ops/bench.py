# SPDX-License-Identifier: Apache-2.0
"""Kernel, driver, vLLM and plain torch side by side, on a machine with a GPU.

    python -m gpu_ops.bench [--budget-s 480] [--json FILE] [--write-tuning FILE] [--check-only | --rehearse]

Checks every way to move pages against the reference, then measures: promotion from 8 KiB to 1 GiB beside a contiguous
copy of the same size and vLLM's own (where vLLM is installed), demotion, shards, crossovers of kernel and driver, the
launch width, and what a transfer does to a matrix product beside it. Prints Markdown with machine, driver and versions,
and whether the promises hold: exit status 1 if one does not.

--rehearse runs all of it on the CPU at small sizes (with TRITON_INTERPRET=1 set before): its figures mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .benchmark.report import Row, table, verdicts
from .direction import Direction
from .dispatch import Measurement, Tuning, crossovers_from, dump_tuning, load_tuning

if TYPE_CHECKING:
    from .benchmark.machine import Machine
    from .benchmark.sections import Bench


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    started = time.monotonic()
    from .benchmark import machine as machines  # noqa: PLC0415 - torch, only when a benchmark really runs
    from .benchmark.correctness import checks  # noqa: PLC0415
    from .benchmark.sections import MEASURED, REHEARSED, Bench  # noqa: PLC0415

    machine: Machine = machines.Rehearsal() if arguments.rehearse else machines.CudaMachine()
    print(*machine.describe(), sep="\n", flush=True)
    names = list(checks(machine))
    print(f"correct: {len(names)} checks against the reference, targets poisoned", flush=True)
    if arguments.check_only:
        return 0
    tuning = load_tuning()
    bench = Bench(machine, REHEARSED if arguments.rehearse else MEASURED, tuning)
    report = Report(lambda: arguments.budget_s - (time.monotonic() - started))
    kept = measure(bench, report, tuning, source=machine.describe()[0])
    if arguments.json:
        arguments.json.write_text(json.dumps([dataclasses.asdict(row) for row in report.rows], indent=1))
    if arguments.write_tuning:
        arguments.write_tuning.write_text(dump_tuning(kept))
    held = verdicts([row for row in report.rows if row.section == "promotion"])
    for holds, text in held:
        print(f"{'holds' if holds else 'FAILS'}: {text}")
    print(f"took {time.monotonic() - started:.0f} s")
    return 0 if arguments.rehearse or all(holds for holds, _ in held) else 1


class Report:
    """Rows as they come, printed per section, until time is up."""

    def __init__(self, left_s: Callable[[], float]) -> None:
        self.rows: list[Row] = []
        self._left_s = left_s

    def section(self, title: str, rows: Iterable[Row], share: float = 1.0) -> None:
        """Takes rows until `share` of the time that is left now has passed."""
        stop_at_s = self._left_s() * (1 - share)
        taken: list[Row] = []
        cut = ""
        for row in rows:
            taken.append(row)
            if self._left_s() <= stop_at_s:
                cut = "\n\n(cut here: no time left)"
                break
        self.rows += taken
        print(f"\n## {title}\n\n{table(taken)}{cut}", flush=True)

    def lines(self, title: str, lines: Iterable[str]) -> None:
        print(f"\n## {title}\n")
        for line in lines:
            print(line, flush=True)
            if self._left_s() <= 0:
                print("(cut here: no time left)")
                break


def measure(bench: Bench, report: Report, tuning: Tuning, source: str) -> Tuning:
    """All sections. Returns the tuning that the crossovers suggest."""
    report.section("Promotion", bench.promotion(), share=0.5)
    report.section("Shards of token-major pages", bench.shards(), share=0.3)
    report.section("Launch width", bench.programs(), share=0.3)
    found: dict[Direction, list[Measurement]] = {direction: [] for direction in Direction}
    for direction in Direction:
        report.section(f"Crossovers, {direction.value}", _kept(bench, direction, found[direction]), share=0.4)
    report.section("Demotion", bench.demotion(), share=0.7)
    report.lines("Beside a matrix product", bench.interference())
    return dataclasses.replace(
        tuning,
        source=f"gpu_ops.bench on {source}",
        promote=crossovers_from(found[Direction.PROMOTE]),
        demote=crossovers_from(found[Direction.DEMOTE]),
    )


def _kept(bench: Bench, direction: Direction, into: list[Measurement]) -> Iterable[Row]:
    for row, measurement in bench.crossovers(direction):
        into.append(measurement)
        yield row


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpu_ops.bench", description=__doc__.split("\n\n", maxsplit=1)[0]
    )
    parser.add_argument(
        "--budget-s", type=float, default=480.0, help="seconds after which sections are cut short"
    )
    parser.add_argument("--json", type=Path, help="also write every row to this file")
    parser.add_argument(
        "--write-tuning", type=Path, help="write the thresholds that were measured to this file"
    )
    parser.add_argument("--check-only", action="store_true", help="compare with the reference and stop")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, in Triton's interpreter")
    return parser


if __name__ == "__main__":
    sys.exit(main())
