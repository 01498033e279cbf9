# SPDX-License-Identifier: Apache-2.0
"""Every policy that does not look ahead on every trace: who wins which cell of the grid.

    python tests/bench/replay_grid.py TRACES [--limit N] [--only TEXT] [--tiers p2p] [--out grid.json]

TRACES is the folder with ``mooncake_fast25_conversation_trace.jsonl.gz``, ``mooncake_fast25_synthetic_trace.jsonl.gz``
and ``kv-cache-tester_raw_subset.jsonl.gz``. Cells: the two Mooncake traces as they arrived, on 8 workers; the agent
sessions at 60 %, 85 % and 105 % of capacity, on 8 and on 64 workers. Costs start from the default profile and
are learnt from the answers, as in the live router; nothing is set per cell. Runs in two processes and takes hours;
``--limit`` measures only the first requests of each cell.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine_ext.sim.profile import load_profile
from router.replay import command, options
from router.replay.policies import REPLAY_POLICIES, AnyPolicyName
from router.replay.summary import Slo
from router.replay.tiers import TIER_SETS, TierSet, with_tiers
from router.replay.workload import Workload

SESSIONS = "kv-cache-tester_raw_subset.jsonl.gz"
MOONCAKE = ("conversation", "synthetic")
LOADS = (0.6, 0.85, 1.05)
WINDOW_S = {8: 600, 64: 150}
"""Measured seconds by workers: about as many requests."""

METRICS = (("ttft_p50_s", min), ("ttft_p99_s", min), ("goodput_requests_per_s", max))


class Cell(NamedTuple):
    """A workload on a fleet, as options of ``pointsman replay``."""

    name: str
    arguments: tuple[str, ...]


def cells(traces: Path, limit: int | None) -> list[Cell]:
    more = ("--calibrate", *(("--limit", str(limit)) if limit else ()))
    found = [
        Cell(
            f"mooncake {name} 8 workers",
            ("--trace", str(traces / f"mooncake_fast25_{name}_trace.jsonl.gz"), "--workers", "8", *more),
        )
        for name in MOONCAKE
    ]
    for workers, window_s in WINDOW_S.items():
        for load in LOADS:
            fleet = ("--workers", str(workers), "--load", str(load), "--duration", str(window_s))
            name = f"agentic {load:.0%} {workers} workers"
            found.append(Cell(name, ("--trace", str(traces / SESSIONS), *fleet, *more)))
    return found


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


@lru_cache(maxsize=1)
def workload(cell: Cell) -> Workload:
    args = parsed(cell.arguments)
    return options.workload(args, options.fleet_capacities(args), load_profile("default"))


def run(cell: Cell, tiers: TierSet, policy: AnyPolicyName) -> dict[str, Any]:
    """One policy in one cell; called in a process of its own."""
    args = parsed(cell.arguments)
    capacities = options.fleet_capacities(args)
    setup = replace(options.fleet_setup(args, capacities), policy=policy)
    started_s = time.monotonic()
    row = command.replay_row(with_tiers(setup, tiers, capacities), tiers, workload(cell), Slo())
    figures: dict[str, Any] = msgspec.to_builtins(row)
    return {"cell": cell.name, "took_s": time.monotonic() - started_s, **figures}


def winners(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line per cell: for each metric who is best, and by how much ours is behind where it is not."""
    lines = []
    for name in dict.fromkeys(row["cell"] for row in rows):
        here = {row["policy"]: row["figures"] for row in rows if row["cell"] == name}
        parts = []
        for metric, better in METRICS:
            # A figure that does not exist (nothing was answered) is null.
            known = {policy: one[metric] for policy, one in here.items() if one[metric] is not None}
            best = better(known, key=known.__getitem__)
            ours, value = known.get("kv_aware"), known[best]
            behind = (
                f", ours {ours:.3f} ({ours / value - 1:+.1%})"
                if best != "kv_aware" and ours and value
                else ""
            )
            parts.append(f"{metric} {best} {value:.3f}{behind}")
        lines.append(f"{name:32s}  " + "   ".join(parts))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument("--policies", default=",".join(REPLAY_POLICIES))
    parser.add_argument("--tiers", choices=TIER_SETS, default="p2p")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("grid.json"))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    chosen = [cell for cell in cells(args.traces, args.limit) if args.only in cell.name]
    # A process keeps its cell's workload, so tasks go by cell.
    with ProcessPoolExecutor(args.processes) as pool:
        tasks = [
            pool.submit(run, cell, args.tiers, policy)
            for cell in chosen
            for policy in REPLAY_POLICIES
            if policy in args.policies.split(",")
        ]
        for task in as_completed(tasks):
            row = task.result()
            rows.append(row)
            args.out.write_text(json.dumps(rows, indent=1))
            shown = "  ".join(f"{metric} {row['figures'][metric]:.3f}" for metric, _ in METRICS)
            print(f"{row['cell']:32s}  {row['policy']:14s}  {shown}  [{row['took_s']:.0f} s]", flush=True)
    print("\n".join(["", *winners(rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
