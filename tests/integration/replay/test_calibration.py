# SPDX-License-Identifier: Apache-2.0
"""A profile that is wrong by four in every constant, corrected while a simulated fleet answers. Virtual time."""

from __future__ import annotations

import statistics
from random import Random

import msgspec
import pytest

from engine_ext.sim.config import SimConfig
from engine_ext.sim.profile import load_profile as load_engine_profile
from router.costs.observation import DecodeObservation
from router.costs.profile import NUMBERS, CostProfile, load_profile
from router.replay.generator import generate_rows
from router.replay.traces import TraceRequest, requests_from_rows
from router.replay.virtual import ReplayedRequest, VirtualFleet, VirtualFleetSetup

ENGINE = SimConfig(
    block_size_tokens=64, hbm_blocks=4_096, ram_blocks=32_768, max_model_len=200_000, track_identity=False
)
LEARNT = 500
"""Requests, after which predictions must be right."""


class Replay:
    """A fleet that answered a trace, and what its answers showed of decoding."""

    def __init__(self, requests: list[TraceRequest], profile: CostProfile, *, calibrate: bool = True) -> None:
        setup = VirtualFleetSetup(
            workers=8,
            engine=ENGINE,
            engine_profile=load_engine_profile("default"),
            cost_profile=profile,
            policy="kv_aware",
            calibrate=calibrate,
            explore=0.01,
        )
        self.fleet = VirtualFleet(setup)
        self.decode_errors: list[float] = []
        calibration = self.fleet.calibration
        if calibration is not None:
            observe = calibration.observe_decode

            def judged(seen: DecodeObservation, now_s: float) -> None:
                # Before it is learnt from; the prefills beside it are no part of the prediction.
                steps, own_s = seen.output_tokens - 1, seen.decode_s - seen.prefill_s
                if steps > 8 and own_s > 0.5 * seen.decode_s:
                    step_s = calibration.model_for(seen.worker).decode_step_s(seen.decodes)
                    self.decode_errors.append(abs(step_s * steps / own_s - 1))
                observe(seen, now_s)

            calibration.observe_decode = judged  # type: ignore[method-assign]
        self.answered = self.fleet.run(requests)

    def median_error(self) -> float:
        """Of predicted against observed time to first token, once it has learnt."""
        return statistics.median(error(one) for one in self.answered[LEARNT:])


def error(one: ReplayedRequest) -> float:
    assert one.ttft_s is not None
    return abs(one.predicted_ttft_s / one.ttft_s - 1)


def conversations() -> list[TraceRequest]:
    chosen = requests_from_rows(generate_rows(seed=7, duration_s=300))[: LEARNT + 150]
    assert len(chosen) == LEARNT + 150
    return chosen


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
CHANCE = Random(1)
WRONG = {
    "slower": dict.fromkeys(CONSTANTS, 4.0),
    "faster": dict.fromkeys(CONSTANTS, 0.25),
    "random": {name: CHANCE.choice((4.0, 0.25)) for name in CONSTANTS},
}


@pytest.mark.parametrize("slower", WRONG.values(), ids=WRONG.keys())
def test_a_profile_wrong_by_four_predicts_within_15_percent_after_500_requests(
    slower: dict[str, float],
) -> None:
    replay = Replay(conversations(), wrong(load_profile("default"), slower))
    decode_error = statistics.median(replay.decode_errors[-100:])
    print(f"time to first token {replay.median_error():.3f}, per output token {decode_error:.3f}")
    assert replay.median_error() < 0.15
    assert decode_error < 0.15
    assert replay.fleet.calibration is not None
    assert replay.fleet.calibration.observations > 400
    assert replay.fleet.calibration.decode_observations > 300


def test_without_calibration_a_wrong_profile_stays_wrong() -> None:
    fixed = Replay(conversations(), wrong(load_profile("default"), WRONG["slower"]), calibrate=False)
    assert fixed.median_error() > 0.3


def test_calibration_does_not_spoil_a_profile_that_is_right() -> None:
    calibrated = Replay(conversations(), load_profile("default"))
    fixed = Replay(conversations(), load_profile("default"), calibrate=False)
    print(f"{calibrated.median_error():.3f}, without calibration {fixed.median_error():.3f}")
    assert calibrated.median_error() < max(fixed.median_error(), 0.05) + 0.02
