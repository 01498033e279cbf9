# SPDX-License-Identifier: Apache-2.0
"""From the command line to a fleet and a workload. Every wrong option is named with what is accepted."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from engine_ext.sim.profile import SimProfile
from engine_ext.sim.profile import load_profile as load_engine_profile
from engine_ext.sim.profile import profile_names as engine_profile_names
from router.config_sections import PlanConfig
from router.costs.profile import load_profile, profile_names
from router.errors import ConfigError
from router.replay import scenarios
from router.replay.faults import with_faults
from router.replay.policies import REPLAY_POLICIES, AnyPolicyName
from router.replay.scenarios import SCENARIOS
from router.replay.session_load import SessionLoad, loaded_traffic
from router.replay.sessions import is_session_file, load_sessions, read_sessions
from router.replay.tiers import TIER_SETS, Capacities, TierSet, engine_config
from router.replay.traces import TraceRequest, load_trace
from router.replay.virtual import VirtualFleetSetup
from router.replay.workload import Workload, open_workload

ALL = "all"
_DEFAULT = "default"
_MOST_WORKERS = 4096
_TRACE_CAPACITIES = Capacities(block_size_tokens=64, hbm_blocks=16_384, ram_blocks=32_768, storage_blocks=0)


def fleet_setup(args: argparse.Namespace, capacities: Capacities) -> VirtualFleetSetup:
    """The fleet, before tiers and policy are chosen.

    Raises:
        ConfigError: an option is wrong.
    """
    workers = fleet_workers(args)
    default = scenarios.PROFILE if args.scenario else _DEFAULT
    profile, engine_profile = args.profile or default, args.engine_profile or default
    if profile not in profile_names():
        raise ConfigError("--profile", profile, f"one of {', '.join(profile_names())}")
    if engine_profile not in engine_profile_names():
        accepted = f"one of {', '.join(engine_profile_names())}"
        raise ConfigError("--engine-profile", engine_profile, accepted)
    if args.regret_sample is not None:
        _check("--regret-sample", args.regret_sample, 1)
    if not 0 <= args.noise < 1:
        raise ConfigError("--noise", args.noise, "a number from 0 to below 1")
    setup = VirtualFleetSetup(
        workers=workers,
        engine=replace(engine_config("gpu", capacities), extension=args.extension),
        engine_profile=load_engine_profile(engine_profile),
        cost_profile=load_profile(profile),
        policy="kv_aware",
        calibrate=args.calibrate,
        explore=PlanConfig().explore if args.calibrate else 0.0,
        noise=args.noise,
        slo_tpot_s=args.slo_tpot,
        seed=args.seed,
    )
    return with_faults(setup, args.fault)


def fleet_workers(args: argparse.Namespace) -> int:
    """``--workers``, or what the scenario has."""
    if args.workers is None and args.scenario:
        return SCENARIOS[args.scenario].workers
    if args.workers is None:
        raise ConfigError("--workers", None, f"a whole number from 1 to {_MOST_WORKERS}")
    _check("--workers", args.workers, 1, _MOST_WORKERS)
    return int(args.workers)


def fleet_capacities(args: argparse.Namespace) -> Capacities:
    """What each worker holds; what is not given is the scenario's, or that of the replays of traces."""
    given = {
        name: getattr(args, option)
        for name, option in (
            ("block_size_tokens", "block_size"),
            ("hbm_blocks", "hbm_blocks"),
            ("ram_blocks", "ram_blocks"),
            ("storage_blocks", "storage_blocks"),
        )
        if getattr(args, option) is not None
    }
    least = {"block_size_tokens": 1, "hbm_blocks": 2, "ram_blocks": 1, "storage_blocks": 0}
    for name, value in given.items():
        _check(f"--{name.removesuffix('_tokens').replace('_', '-')}", value, least[name])
    return replace(scenarios.CAPACITIES if args.scenario else _TRACE_CAPACITIES, **given)


def workload(args: argparse.Namespace, capacities: Capacities, engine: SimProfile) -> Workload:
    """What is sent.

    Raises:
        ConfigError: an option is wrong, or nothing is left to send.
        TraceError: the trace cannot be read.
    """
    for option, count in (("--limit", args.limit), ("--max-input", args.max_input)):
        if count is not None:
            _check(option, count, 1)
    rates = ("speedup", "sessions_per_s", "load", "duration", "max_gap", "slo_ttft", "slo_tpot")
    for name in rates:
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')}", value, "a number above 0")
    if args.speedup != 1 and (args.scenario or args.load is not None):
        raise ConfigError("--speedup", args.speedup, "1 where --scenario or --load gives the arrivals")
    if args.scenario:
        return SCENARIOS[args.scenario].workload(args.seed, args.limit)
    most_tokens = (capacities.hbm_blocks - 1) * capacities.block_size_tokens - 1
    if args.max_input is not None:
        most_tokens = min(most_tokens, args.max_input)
    found = _session_load(args, most_tokens, engine) if args.load is not None else _trace(args, most_tokens)
    if not found.measured:
        raise ConfigError("--trace", args.trace, "a trace with requests that fit into a worker's HBM")
    return found


def _trace(args: argparse.Namespace, most_tokens: int) -> Workload:
    requests = _requests(args)
    fitting = [
        replace(one, arrival_s=one.arrival_s / args.speedup)
        for one in requests
        if one.input_tokens <= most_tokens
    ]
    return open_workload(args.trace, fitting, too_long=len(requests) - len(fitting))


def _requests(args: argparse.Namespace) -> list[TraceRequest]:
    path = Path(args.trace)
    if is_session_file(path):
        return load_sessions(path, args.sessions_per_s, args.seed, args.limit, args.max_gap)
    return load_trace(path, args.limit)


def _session_load(args: argparse.Namespace, most_tokens: int, engine: SimProfile) -> Workload:
    path = Path(args.trace)
    if not is_session_file(path):
        raise ConfigError("--load", args.load, "nothing but with a file of sessions")
    wanted = SessionLoad(load=args.load, workers=fleet_workers(args), window_s=args.duration, seed=args.seed)
    wanted = replace(wanted, max_input_tokens=min(most_tokens, args.max_input or wanted.max_input_tokens))
    if args.max_gap is not None:
        wanted = replace(wanted, max_gap_s=args.max_gap)
    traffic = loaded_traffic(list(read_sessions(path)), engine, wanted)
    warm = sum(one.arrival_s < traffic.measured_from_s for one in traffic.requests)
    kept = traffic.requests[: None if args.limit is None else warm + args.limit]
    return open_workload(
        f"{args.trace} at {args.load:g} of capacity ({traffic.sessions_per_s:.3g} sessions/s)",
        kept,
        traffic.measured_from_s,
        traffic.too_long,
    )


def tier_sets(args: argparse.Namespace) -> list[TierSet]:
    """A scenario has one fleet, whose workers pull from each other."""
    if args.scenario:
        return ["p2p"]
    return [one for one in TIER_SETS if args.tiers in (one, ALL)]


def policies(args: argparse.Namespace) -> list[AnyPolicyName]:
    """All: those that do not look ahead; of a scenario, those that its source measured, and ours."""
    if args.policy != ALL:
        return [args.policy]
    return list(scenarios.POLICIES if args.scenario else REPLAY_POLICIES)


def _check(option: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        accepted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(option, value, f"a whole number {accepted}")
