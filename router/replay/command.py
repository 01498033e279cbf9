# SPDX-License-Identifier: Apache-2.0
"""``pointsman replay``: traffic over simulated fleets in virtual time, one row per fleet and policy.

The traffic is a recorded trace, or one of three scenarios whose figures are published for other routers. The
router believes ``--profile``; what a step or a transfer really takes is ``--engine-profile``, constants of the
simulator's own. So a replay also shows what a wrong profile costs.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from engine_ext.sim.profile import load_profile as load_engine_profile
from router.errors import ConfigError
from router.replay import options
from router.replay.faults import FORMS
from router.replay.oracle import spread
from router.replay.plot import render_page
from router.replay.policies import REPLAY_POLICIES
from router.replay.report import Regret, ReplayReport, ReplayRow, render_json, render_table
from router.replay.scenarios import PROFILE, SCENARIO_NAMES
from router.replay.summary import Slo, summarize
from router.replay.tiers import TIER_SETS, Capacities, TierSet, with_tiers
from router.replay.traces import TraceError
from router.replay.virtual import VirtualFleet, VirtualFleetSetup
from router.replay.workload import Workload

_log = logging.getLogger(__name__)

EXIT_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    traffic = parser.add_mutually_exclusive_group(required=True)
    traffic.add_argument(
        "--trace",
        metavar="FILE",
        help="JSON lines, plain or .gz: requests in Mooncake's form, or sessions in kv-cache-tester's",
    )
    traffic.add_argument(
        "--scenario",
        choices=SCENARIO_NAMES,
        help="a fleet and a workload that llm-d published figures of; it sets workers, capacities and profiles",
    )
    _add_arrivals(parser)
    _add_fleet(parser)
    parser.add_argument(
        "--policy",
        choices=[*REPLAY_POLICIES, "oracle", options.ALL],
        default="kv_aware",
        help="who decides; all leaves the oracle out, which tries every plan on a copy of the fleet (slow)",
    )
    parser.add_argument(
        "--regret-sample",
        type=int,
        metavar="N",
        help="compare N decisions, evenly spread, with all that could have been taken, on copies of the fleet",
    )
    parser.add_argument(
        "--slo-ttft", type=float, default=Slo().ttft_s, metavar="S", help="seconds, for goodput (default: 2)"
    )
    parser.add_argument(
        "--slo-tpot",
        type=float,
        default=Slo().tpot_s,
        metavar="S",
        help="seconds per output token behind the first, for goodput; what requests ask for (default: 0.05)",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--plot", metavar="FILE", help="write a page with the figures as bars and curves")


def _add_arrivals(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first N requests (that are measured)"
    )
    parser.add_argument(
        "--max-input",
        type=int,
        metavar="N",
        help="leave out requests of more input tokens; those that no worker has room for always are",
    )
    parser.add_argument("--speedup", type=float, default=1.0, metavar="X", help="arrivals X times as fast")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of what is left to chance")
    sessions = parser.add_argument_group("a file of sessions")
    begin = sessions.add_mutually_exclusive_group()
    begin.add_argument(
        "--sessions-per-s",
        type=float,
        default=0.05,
        metavar="X",
        help="each begins once, so many per second (default: 0.05)",
    )
    begin.add_argument(
        "--load",
        type=float,
        metavar="X",
        help="sessions drawn and begun so that they ask for this share of the engines' time, in a steady state",
    )
    sessions.add_argument(
        "--duration", type=float, default=600.0, metavar="S", help="measured time with --load (default: 600)"
    )
    sessions.add_argument(
        "--max-gap",
        type=float,
        metavar="S",
        help="cut longer pauses within a session (default: 60 with --load, else never)",
    )


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help="simulated workers")
    parser.add_argument(
        "--tiers",
        choices=[*TIER_SETS, options.ALL],
        default="p2p",
        help="what each worker has, each with all before it; all: one row for each (default: p2p)",
    )
    default = f"(default: default; of a scenario {PROFILE})"
    parser.add_argument("--profile", metavar="NAME", help=f"costs that the router believes {default}")
    parser.add_argument("--engine-profile", metavar="NAME", help=f"times that engines really take {default}")
    parser.add_argument(
        "--calibrate", action="store_true", help="learn the costs from the answers, as the live router does"
    )
    parser.add_argument(
        "--extension",
        action="store_true",
        help="workers run our engine extension: they pull from several peers at once",
    )
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens (default: 64)")
    parser.add_argument("--hbm-blocks", type=int, metavar="N", help="per worker (default: 16384)")
    parser.add_argument("--ram-blocks", type=int, metavar="N", help="per worker (default: 32768)")
    parser.add_argument(
        "--storage-blocks",
        type=int,
        metavar="N",
        help="per worker (default: 0, no bound; none in a scenario)",
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        metavar="X",
        help="standard deviation of what steps and transfers take, over what they take",
    )
    parser.add_argument(
        "--fault", action="append", default=[], metavar="FAULT", help=f"{FORMS}; may be repeated"
    )


def run(args: argparse.Namespace) -> int:
    """Replay and print; returns the exit code.

    Raises:
        ConfigError: an option is wrong.
    """
    capacities = options.fleet_capacities(args)
    setup = options.fleet_setup(args, capacities)
    engine_profile = args.engine_profile or (PROFILE if args.scenario else "default")
    try:
        workload = options.workload(args, capacities, load_engine_profile(engine_profile))
    except TraceError as error:
        print(f"pointsman: {error}", file=sys.stderr)
        return EXIT_USAGE
    if args.regret_sample is not None:
        setup = replace(setup, judge=_judged(workload, args.regret_sample))
    report = ReplayReport(
        trace=workload.title,
        workers=setup.workers,
        profile=args.profile or (PROFILE if args.scenario else "default"),
        engine_profile=engine_profile,
        calibrated=args.calibrate,
        speedup=args.speedup,
        seed=args.seed,
        too_long=workload.too_long,
        slo=Slo(args.slo_ttft, args.slo_tpot),
        rows=[],
    )
    report = replace(report, rows=list(_rows(args, setup, capacities, workload, report.slo)))
    if args.plot:
        _write(Path(args.plot), render_page(report))
    print(render_json(report) if args.json else render_table(report))
    return 0


def _judged(workload: Workload, sample: int) -> frozenset[int]:
    return frozenset(workload.measured[place] for place in spread(len(workload.measured), sample))


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--plot", str(path), f"a file that can be written ({error.strerror})") from error


def _rows(
    args: argparse.Namespace,
    setup: VirtualFleetSetup,
    capacities: Capacities,
    workload: Workload,
    slo: Slo,
) -> Iterator[ReplayRow]:
    for tiers in options.tier_sets(args):
        for policy in options.policies(args):
            started_s = time.monotonic()
            fleet = replace(with_tiers(setup, tiers, capacities), policy=policy)
            yield replay_row(fleet, tiers, workload, slo)
            _log.info("%s, %s: replayed in %.1f s", tiers, policy, time.monotonic() - started_s)


def replay_row(setup: VirtualFleetSetup, tiers: TierSet, workload: Workload, slo: Slo) -> ReplayRow:
    """The figures of one fleet under one policy."""
    fleet = VirtualFleet(setup)
    measured = set(workload.measured)
    replayed = [one for one in fleet.replay(workload.begin()) if one.index in measured]
    regrets = [one.regret for one in fleet.judged]
    return ReplayRow(
        tiers,
        setup.policy,
        summarize(replayed, setup.workers, slo),
        Regret.of(regrets) if regrets else None,
        quantiles([one.ttft_s for one in replayed if one.ttft_s is not None]),
    )


def quantiles(values: Sequence[float]) -> list[float]:
    """The 0th to the 100th percentile."""
    ordered = sorted(values)
    return [ordered[round(percent / 100 * (len(ordered) - 1))] for percent in range(101)]
