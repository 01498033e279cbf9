# SPDX-License-Identifier: Apache-2.0
"""``pointsman replay``: a recorded trace over simulated fleets in virtual time, one row per fleet and policy.

The router believes ``--profile``; what a step or a transfer really takes is ``--engine-profile``, constants of the
simulator's own. So a replay also shows what a wrong profile costs.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from engine_ext.sim.profile import load_profile as load_engine_profile
from engine_ext.sim.profile import profile_names as engine_profile_names
from router.costs.profile import load_profile, profile_names
from router.errors import ConfigError
from router.replay.policies import REPLAY_POLICIES, ReplayPolicyName
from router.replay.report import ReplayReport, ReplayRow, render_json, render_table
from router.replay.sessions import is_session_file, load_sessions
from router.replay.summary import summarize
from router.replay.tiers import TIER_SETS, Capacities, TierSet, engine_config, with_tiers
from router.replay.traces import TraceError, TraceRequest, load_trace
from router.replay.virtual import VirtualFleet, VirtualFleetSetup

_log = logging.getLogger(__name__)

ALL = "all"
EXIT_USAGE = 2
_MOST_WORKERS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--trace",
        required=True,
        metavar="FILE",
        help="JSON lines, plain or .gz: requests in Mooncake's form, or sessions in kv-cache-tester's",
    )
    parser.add_argument(
        "--sessions-per-s",
        type=float,
        default=0.05,
        metavar="X",
        help="of a file of sessions: how many begin per second (default: 0.05)",
    )
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="simulated workers")
    parser.add_argument(
        "--tiers",
        choices=[*TIER_SETS, ALL],
        default="p2p",
        help="what each worker has, each with all before it; all: one row for each (default: p2p)",
    )
    parser.add_argument("--policy", choices=[*REPLAY_POLICIES, ALL], default="kv_aware", help="who decides")
    parser.add_argument("--profile", default="default", metavar="NAME", help="costs that the router believes")
    parser.add_argument(
        "--engine-profile", default="default", metavar="NAME", help="times that the engines really take"
    )
    parser.add_argument(
        "--calibrate", action="store_true", help="learn the costs from the answers, as the live router does"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    parser.add_argument(
        "--max-input",
        type=int,
        metavar="N",
        help="leave out requests of more input tokens; those that no worker has room for always are",
    )
    parser.add_argument("--speedup", type=float, default=1.0, metavar="X", help="arrivals X times as fast")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of what is left to chance")
    parser.add_argument("--block-size", type=int, default=64, metavar="N", help="tokens (default: 64)")
    parser.add_argument("--hbm-blocks", type=int, default=16_384, metavar="N", help="per worker")
    parser.add_argument("--ram-blocks", type=int, default=32_768, metavar="N", help="per worker")
    parser.add_argument(
        "--storage-blocks", type=int, default=0, metavar="N", help="per worker (default: 0, no bound)"
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="events@T:WORKER",
        help="cut the event channel of worker 0..N-1 after T seconds; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(args: argparse.Namespace) -> int:
    """Replay and print; returns the exit code.

    Raises:
        ConfigError: an option is wrong.
    """
    capacities = _capacities(args)
    setup = _setup(args, capacities)
    try:
        requests = _load(args)
    except TraceError as error:
        print(f"pointsman: {error}", file=sys.stderr)
        return EXIT_USAGE
    most_tokens = (capacities.hbm_blocks - 1) * capacities.block_size_tokens - 1
    if args.max_input is not None:
        most_tokens = min(most_tokens, args.max_input)
    fitting = [
        replace(one, arrival_s=one.arrival_s / args.speedup)
        for one in requests
        if one.input_tokens <= most_tokens
    ]
    if not fitting:
        raise ConfigError("--trace", args.trace, "a trace with requests that fit into a worker's HBM")
    report = ReplayReport(
        trace=args.trace,
        workers=args.workers,
        profile=args.profile,
        engine_profile=args.engine_profile,
        calibrated=args.calibrate,
        speedup=args.speedup,
        seed=args.seed,
        too_long=len(requests) - len(fitting),
        rows=list(_rows(setup, capacities, fitting, _tier_sets(args.tiers), _policies(args.policy))),
    )
    print(render_json(report) if args.json else render_table(report))
    return 0


def _load(args: argparse.Namespace) -> list[TraceRequest]:
    path = Path(args.trace)
    if is_session_file(path):
        return load_sessions(path, args.sessions_per_s, args.seed, args.limit)
    return load_trace(path, args.limit)


def _rows(
    setup: VirtualFleetSetup,
    capacities: Capacities,
    requests: Sequence[TraceRequest],
    tier_sets: Sequence[TierSet],
    policies: Sequence[ReplayPolicyName],
) -> Iterator[ReplayRow]:
    for tiers in tier_sets:
        for policy in policies:
            started_s = time.monotonic()
            fleet = VirtualFleet(replace(with_tiers(setup, tiers, capacities), policy=policy))
            figures = summarize(fleet.run(requests), setup.workers)
            _log.info("%s, %s: replayed in %.1f s", tiers, policy, time.monotonic() - started_s)
            yield ReplayRow(tiers, policy, figures)


def _setup(args: argparse.Namespace, capacities: Capacities) -> VirtualFleetSetup:
    _check("--workers", args.workers, 1, _MOST_WORKERS)
    for option, value in (("--limit", args.limit), ("--max-input", args.max_input)):
        if value is not None:
            _check(option, value, 1)
    for option, rate in (("--speedup", args.speedup), ("--sessions-per-s", args.sessions_per_s)):
        if not 0 < rate < float("inf"):
            raise ConfigError(option, rate, "a number above 0")
    if args.profile not in profile_names():
        raise ConfigError("--profile", args.profile, f"one of {', '.join(profile_names())}")
    if args.engine_profile not in engine_profile_names():
        accepted = f"one of {', '.join(engine_profile_names())}"
        raise ConfigError("--engine-profile", args.engine_profile, accepted)
    return VirtualFleetSetup(
        workers=args.workers,
        engine=engine_config("gpu", capacities),
        engine_profile=load_engine_profile(args.engine_profile),
        cost_profile=load_profile(args.profile),
        policy="kv_aware",
        calibrate=args.calibrate,
        events_cut_at_s=parse_faults(args.fault, args.workers),
        seed=args.seed,
    )


def _capacities(args: argparse.Namespace) -> Capacities:
    _check("--block-size", args.block_size, 1)
    _check("--hbm-blocks", args.hbm_blocks, 2)
    _check("--ram-blocks", args.ram_blocks, 1)
    _check("--storage-blocks", args.storage_blocks, 0)
    return Capacities(
        block_size_tokens=args.block_size,
        hbm_blocks=args.hbm_blocks,
        ram_blocks=args.ram_blocks,
        storage_blocks=args.storage_blocks,
    )


def parse_faults(texts: Sequence[str], workers: int) -> Mapping[str, float]:
    """``events@60:3`` as worker to seconds.

    Raises:
        ConfigError: something else, or no such worker.
    """
    accepted = f"events@SECONDS:WORKER with a worker from 0 to {workers - 1}"
    faults: dict[str, float] = {}
    for text in texts:
        kind, _, rest = text.partition("@")
        at, _, worker = rest.partition(":")
        try:
            at_s, number = float(at), int(worker.removeprefix("w"))
        except ValueError:
            raise ConfigError("--fault", text, accepted) from None
        if kind != "events" or not at_s >= 0 or not 0 <= number < workers:
            raise ConfigError("--fault", text, accepted)
        faults[f"w{number}"] = at_s
    return faults


def _check(option: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        accepted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(option, value, f"a whole number {accepted}")


def _tier_sets(name: str) -> list[TierSet]:
    return [one for one in TIER_SETS if name in (one, ALL)]


def _policies(name: str) -> list[ReplayPolicyName]:
    return [one for one in REPLAY_POLICIES if name in (one, ALL)]
