# SPDX-License-Identifier: Apache-2.0
"""The three published fleet scenarios in full: whether our replay has the orders on which both published runs agree.

    python tests/bench/scenarios.py [document_qa] [uniform_pool] [hot_set] [--seeds 1]

Prints the table of each scenario and one line per order that must hold; exits with 1 where one does not. Takes
some minutes. What is published: llm-d, guides/p2p-kv-cache-sharing/benchmark-results/gpt-oss-120b-h200.md, 2026-08.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace

from router.replay import command, options
from router.replay.report import ReplayReport, ReplayRow, render_table
from router.replay.scenarios import POLICIES, PROFILE, SCENARIO_NAMES, SCENARIOS
from router.replay.summary import Slo
from router.replay.tiers import with_tiers

FIXED = ("affinity", "affinity_pull", "load", "load_pull")
MUCH = 2.0
"""How many times as much "far more" is at least."""


def orders(scenario: str, rows: Mapping[str, ReplayRow]) -> Iterator[tuple[str, bool]]:
    """What must hold, and whether it does."""
    figures = {policy: row.figures for policy, row in rows.items()}
    p95_s = {policy: row.ttft_percentiles_s[95] for policy, row in rows.items()}
    p99_s = {policy: one.ttft_p99_s for policy, one in figures.items()}
    p50_s = {policy: one.ttft_p50_s for policy, one in figures.items()}
    rate = {policy: one.requests_per_s for policy, one in figures.items()}
    if scenario == "document_qa":
        for other in ("affinity", "affinity_pull"):
            yield f"p99 of load_pull below {other}", p99_s["load_pull"] < p99_s[other]
            yield f"p95 of load_pull below {other}", p95_s["load_pull"] < p95_s[other]
            yield f"turns/s of load_pull above {other}", rate["load_pull"] > rate[other]
        yield "p50 of affinity_pull below load_pull", p50_s["affinity_pull"] < p50_s["load_pull"]
        yield "ours: p99 no worse than the best fixed", p99_s["kv_aware"] <= min(p99_s[one] for one in FIXED)
    else:
        yield "rate of affinity at least load_pull", rate["affinity"] >= rate["load_pull"]
        yield "p50 of affinity at most load_pull", p50_s["affinity"] <= p50_s["load_pull"]
        yield "rate of load_pull far above load", rate["load_pull"] > MUCH * rate["load"]
        yield "p50 of load_pull far below load", MUCH * p50_s["load_pull"] < p50_s["load"]
    # What is measured at a constant rate ends with the last answer, so equal rates differ by one answer's length.
    yield (
        "ours: rate no worse than the best fixed",
        rate["kv_aware"] >= 0.995 * max(rate[one] for one in FIXED),
    )
    yield (
        "ours: p50 no worse than the best fixed",
        p50_s["kv_aware"] <= 1.005 * min(p50_s[one] for one in FIXED),
    )


def replayed(scenario: str, seed: int) -> dict[str, ReplayRow]:
    """All policies of a scenario."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--scenario", scenario, "--seed", str(seed)])
    capacities = options.fleet_capacities(args)
    setup = with_tiers(options.fleet_setup(args, capacities), "p2p", capacities)
    workload = {str(name): one for name, one in SCENARIOS.items()}[scenario].workload(seed, None)
    rows = {}
    for policy in POLICIES:
        rows[str(policy)] = command.replay_row(replace(setup, policy=policy), "p2p", workload, Slo())
    report = ReplayReport(scenario, setup.workers, PROFILE, PROFILE, False, 1.0, seed, 0, list(rows.values()))
    print(render_table(report), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIO_NAMES))
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    broken = 0
    for scenario in args.scenarios:
        for seed in range(args.seeds):
            for order, holds in orders(scenario, replayed(scenario, seed)):
                print(f"{'holds' if holds else 'FAILS'}  {scenario}, seed {seed}: {order}", flush=True)
                broken += not holds
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
