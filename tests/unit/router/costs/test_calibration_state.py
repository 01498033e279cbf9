# SPDX-License-Identifier: Apache-2.0
"""What was learnt, dumped and loaded."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from cost_truth import PROFILE, pull, pull_s, seen, slower

from router.costs.calibration import Calibration
from router.costs.calibration_state import CalibrationState
from router.costs.model import CostModel


def test_what_was_learnt_survives_a_dump_and_a_load() -> None:
    calibration = Calibration(PROFILE)
    truth = CostModel(slower(PROFILE, 2))
    for i in range(50):
        calibration.observe(pull(truth, None, tokens=1000 + 300 * i), float(i))
        calibration.observe(seen(truth, prompt_tokens=1000 + 300 * i), i + 0.5)
    raw = msgspec.json.encode(calibration.dump(50.0))
    again = Calibration(PROFILE)
    assert again.load(msgspec.json.decode(raw, type=CalibrationState), 9_000.0)
    assert again.model_for("w").profile.prefill_s_per_token == pytest.approx(
        calibration.model_for("w").profile.prefill_s_per_token, rel=0.02
    )
    assert pull_s(again) == pytest.approx(pull_s(calibration), rel=0.02)
    assert again.snapshot()["links"] == calibration.snapshot()["links"]


def test_what_was_learnt_over_another_profile_is_refused() -> None:
    calibration = Calibration(slower(PROFILE, 2))
    assert not calibration.load(Calibration(PROFILE).dump(0.0), 0.0)


def test_a_state_with_other_factors_is_refused_whole() -> None:
    calibration = Calibration(PROFILE)
    calibration.observe(seen(CostModel(PROFILE), noise=2.0), 0.0)
    state = calibration.dump(0.0)
    other = msgspec.structs.replace(state, fleet_links=msgspec.structs.replace(state.fleet, mean=[1.0]))
    again = Calibration(PROFILE)
    assert not again.load(other, 0.0)
    assert again.model_for("w").profile == PROFILE


def test_forgetting_a_worker_forgets_its_links() -> None:
    calibration = Calibration(PROFILE)
    for i in range(20):
        calibration.observe(pull(CostModel(slower(PROFILE, 3)), None), float(i))
        calibration.observe(pull(CostModel(PROFILE), None, source="t", worker="v"), float(i))
    calibration.forget("s")
    assert [(row["source"], row["destination"]) for row in calibration.snapshot()["links"]] == [("t", "v")]
    calibration.forget("w")
    assert list(calibration.snapshot()["workers"]) == ["v"]


@pytest.mark.parametrize(
    "spoilt",
    [
        {"mean": [math.nan] * 7},
        {"covariance": [[-1.0] * 7] * 7},
        {"counts": [0] * 6},
        {"observed_age_s": -5.0},
    ],
    ids=["no number", "negative variance", "too short", "from the future"],
)
def test_a_state_that_cannot_be_is_refused_whole(spoilt: dict[str, Any]) -> None:
    state = Calibration(PROFILE).dump(0.0)
    bad = msgspec.structs.replace(state, fleet=msgspec.structs.replace(state.fleet, **spoilt))
    calibration = Calibration(PROFILE)
    assert not calibration.load(bad, 0.0)
    assert calibration.model_for("w").profile == PROFILE


def test_a_dump_does_not_change_with_what_is_learnt_after_it() -> None:
    calibration = Calibration(PROFILE)
    truth = CostModel(slower(PROFILE, 3))
    for i in range(10):
        calibration.observe(pull(truth, None), float(i))
    state = calibration.dump(10.0)
    before = msgspec.json.encode(state)
    for i in range(10, 400, 10):
        calibration.observe(pull(truth, None, noise=5.0), float(i))
        calibration.observe(seen(truth, noise=0.2), i + 1.0)
    assert msgspec.json.encode(state) == before
