# SPDX-License-Identifier: Apache-2.0
"""How far decisions are from the best that could be done, with costs learnt from a profile that is wrong.

    python tests/bench/regret.py TRACE [--requests 1100] [--sample 40] [--tiers p2p]

Every constant of the cost profile is four times too slow, four times too fast, or one of both by chance. After 500
requests of the trace, sampled decisions are compared with every other action: the simulator is forked at the
decision, and each copy runs until the request's first token. Regret is the time to first token over that of the best
action, less 1. Three profiles beside the right one, in two processes.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec

from engine_ext.sim.profile import load_profile as load_engine_profile
from router.config_sections import PlanConfig
from router.costs.profile import NUMBERS, CostProfile, load_profile
from router.replay.tiers import Capacities, engine_config, with_tiers
from router.replay.traces import load_trace
from router.replay.virtual import VirtualFleet, VirtualFleetSetup

LEARNT = 500
SIZES = frozenset({"kv_bytes_per_token", "step_tokens", "peer_share_exponent"})
"""No seconds: sizes that a configuration tells, and an exponent."""


def wrong(kind: str) -> CostProfile:
    profile = load_profile("default")
    random = Random(4)
    changes: dict[str, float] = {}
    for name in NUMBERS:
        slower = {"right": 1.0, "slower": 4.0, "faster": 0.25, "random": random.choice((4.0, 0.25))}[kind]
        if name not in SIZES:
            value = getattr(profile, name)
            changes[name] = value / slower if name.endswith("_bytes_per_s") else value * slower
    return msgspec.structs.replace(profile, **changes)


def measure(task: tuple[str, Path, int, int, str]) -> str:
    kind, trace, requests, sample, tiers = task
    capacities = Capacities(block_size_tokens=64, hbm_blocks=16_384, ram_blocks=32_768, storage_blocks=0)
    chosen = [one for one in load_trace(trace, requests) if one.input_tokens < 16_383 * 64 - 1]
    step = max((len(chosen) - LEARNT) // sample, 1)
    setup = VirtualFleetSetup(
        workers=8,
        engine=engine_config("gpu", capacities),
        engine_profile=load_engine_profile("default"),
        cost_profile=wrong(kind),
        policy="kv_aware",
        calibrate=True,
        explore=PlanConfig().explore,
        judge=frozenset(one.index for one in chosen[LEARNT::step][:sample]),
    )
    fleet = VirtualFleet(with_tiers(replace(setup), tiers, capacities))  # type: ignore[arg-type]
    answered = fleet.run(chosen)[LEARNT:]
    regrets = sorted(one.regret for one in fleet.judged)
    errors = [abs(one.predicted_ttft_s / one.ttft_s - 1) for one in answered if one.ttft_s]
    return (
        f"{kind:7s} regret mean {statistics.fmean(regrets):.3f}, median {statistics.median(regrets):.3f}, "
        f"p95 {regrets[len(regrets) * 95 // 100]:.3f} of {len(regrets)} decisions; "
        f"median error of predicted TTFT {statistics.median(errors):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1100)
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--tiers", default="p2p")
    args = parser.parse_args()
    tasks = [
        (kind, args.trace, args.requests, args.sample, args.tiers)
        for kind in ("right", "slower", "faster", "random")
    ]
    with ProcessPoolExecutor(2) as pool:
        for line in pool.map(measure, tasks):
            print(line, flush=True)


if __name__ == "__main__":
    main()
