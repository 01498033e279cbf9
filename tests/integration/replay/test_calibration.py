# SPDX-License-Identifier: Apache-2.0
"""A profile that is wrong by four in every constant, corrected while a simulated fleet answers. Virtual time."""

from __future__ import annotations

import statistics

import msgspec
import pytest

from engine_ext.sim.config import SimConfig
from engine_ext.sim.profile import load_profile as load_engine_profile
from router.costs.profile import NUMBERS, CostProfile, load_profile
from router.replay.generator import generate_rows
from router.replay.traces import TraceRequest, requests_from_rows
from router.replay.virtual import ReplayedRequest, VirtualFleet, VirtualFleetSetup

ENGINE = SimConfig(
    block_size_tokens=64, hbm_blocks=4_096, ram_blocks=32_768, max_model_len=200_000, track_identity=False
)


def requests() -> list[TraceRequest]:
    chosen = requests_from_rows(generate_rows(seed=7, duration_s=300))[:500]
    assert len(chosen) == 500
    return chosen


def replay(profile: CostProfile, *, calibrate: bool) -> tuple[VirtualFleet, list[ReplayedRequest]]:
    setup = VirtualFleetSetup(
        workers=8,
        engine=ENGINE,
        engine_profile=load_engine_profile("default"),
        cost_profile=profile,
        policy="kv_aware",
        calibrate=calibrate,
    )
    fleet = VirtualFleet(setup)
    return fleet, fleet.run(requests())


def median_error(replayed: list[ReplayedRequest]) -> float:
    """Of predicted against observed time to first token, over the last hundred requests."""
    errors = []
    for one in replayed[-100:]:
        assert one.ttft_s is not None
        errors.append(abs(one.predicted_ttft_s / one.ttft_s - 1))
    return statistics.median(errors)


def wrong(profile: CostProfile, slower: dict[str, float]) -> CostProfile:
    """Every time ``slower`` by that factor, every rate slower by it too."""
    changes = {
        name: getattr(profile, name) / factor
        if name.endswith("_bytes_per_s")
        else getattr(profile, name) * factor
        for name, factor in slower.items()
    }
    return msgspec.structs.replace(profile, **changes)


CONSTANTS = [name for name in NUMBERS if name != "kv_bytes_per_token"]
WRONG = {
    "slower": dict.fromkeys(CONSTANTS, 4.0),
    "mixed": {name: (4.0, 0.25)[i % 2] for i, name in enumerate(CONSTANTS)},
}


@pytest.mark.parametrize("slower", WRONG.values(), ids=WRONG.keys())
def test_a_profile_wrong_by_four_predicts_within_15_percent_after_400_requests(
    slower: dict[str, float],
) -> None:
    profile = wrong(load_profile("default"), slower)
    fleet, calibrated = replay(profile, calibrate=True)
    _, fixed = replay(profile, calibrate=False)
    print(f"median error {median_error(calibrated):.3f}, without calibration {median_error(fixed):.3f}")
    assert median_error(calibrated) < 0.15
    assert median_error(fixed) > 0.3
    assert fleet.calibration is not None
    assert fleet.calibration.observations > 300


def test_calibration_does_not_spoil_a_profile_that_is_right() -> None:
    _, calibrated = replay(load_profile("default"), calibrate=True)
    _, fixed = replay(load_profile("default"), calibrate=False)
    print(f"median error {median_error(calibrated):.3f}, without calibration {median_error(fixed):.3f}")
    assert median_error(calibrated) < max(median_error(fixed), 0.05) + 0.02
