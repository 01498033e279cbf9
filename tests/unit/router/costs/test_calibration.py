# SPDX-License-Identifier: Apache-2.0
"""What is learnt about prefills and loads."""

from __future__ import annotations

import math
from random import Random

import msgspec
import pytest
from cost_truth import PROFILE, SECONDS, pull, pull_s, seen, slower

from router.costs.calibration import Calibration
from router.costs.model import CostModel


def test_nothing_observed_means_the_profile() -> None:
    calibration = Calibration(PROFILE)
    assert calibration.model_for("w").profile == PROFILE
    assert calibration.link("s", "w") == CostModel(PROFILE).link("s", "w")


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_every_constant_of_a_prefill_is_found_among_noise(factor: float) -> None:
    random = Random(1)
    truth = CostModel(PROFILE)
    calibration = Calibration(slower(PROFILE, factor))
    for i in range(300):
        tokens = round(math.exp(random.uniform(math.log(100), math.log(60_000))))
        noise = random.lognormvariate(0, 0.1)
        calibration.observe(seen(truth, prompt_tokens=tokens, noise=noise), float(i))
    found = calibration.model_for("w").profile
    for name in SECONDS:
        assert getattr(found, name) == pytest.approx(getattr(PROFILE, name), rel=0.3), name
    for tokens in (200, 2_000, 20_000, 60_000):
        expected = truth.prefill_s(0, tokens, 0)
        assert calibration.model_for("w").prefill_s(0, tokens, 0) == pytest.approx(expected, rel=0.06)


def test_promotion_is_found_and_the_rest_left_alone() -> None:
    calibration = Calibration(msgspec.structs.replace(PROFILE, ram_bytes_per_s=PROFILE.ram_bytes_per_s * 4))
    truth = CostModel(PROFILE)
    for i in range(60):
        calibration.observe(seen(truth, prompt_tokens=1000 + 500 * i), 2.0 * i)
        loaded = seen(truth, prompt_tokens=16_000, ram_tokens=15_984, planned_cached_tokens=15_984)
        calibration.observe(loaded, 2.0 * i + 1)
    found = calibration.model_for("w").profile
    assert found.ram_bytes_per_s == pytest.approx(PROFILE.ram_bytes_per_s, rel=0.2)
    assert found.prefill_s_per_token == pytest.approx(PROFILE.prefill_s_per_token, rel=0.1)


def test_one_worker_that_is_slower_does_not_slow_the_others() -> None:
    calibration = Calibration(PROFILE)
    fast, slow = CostModel(PROFILE), CostModel(slower(PROFILE, 2.5))
    for i in range(200):
        worker = f"w{i % 8}"
        truth = slow if worker == "w3" else fast
        calibration.observe(seen(truth, worker=worker, prompt_tokens=500 + 97 * i), float(i))
    for worker in ("w0", "w7", "unknown"):
        seconds = calibration.model_for(worker).prefill_s(0, 8000, 0)
        assert seconds == pytest.approx(fast.prefill_s(0, 8000, 0), rel=0.15), worker
    assert calibration.model_for("w3").prefill_s(0, 8000, 0) == pytest.approx(
        slow.prefill_s(0, 8000, 0), rel=0.15
    )


def test_links_that_were_never_used_learn_from_those_that_were() -> None:
    calibration = Calibration(slower(PROFILE, 4.0))
    truth = CostModel(PROFILE)
    for i in range(60):
        one = pull(truth, None, source=f"s{i % 5}", worker=f"w{i % 4}", tokens=2000 + 500 * i)
        calibration.observe(one, float(i))
    assert pull_s(calibration, "other", "another") == pytest.approx(
        truth.peer_s(16_000, 0, connected=True), rel=0.15
    )


def test_a_thin_fit_stays_near_the_prior_and_says_that_it_knows_little() -> None:
    calibration = Calibration(PROFILE)
    truth = CostModel(slower(PROFILE, 3.0))
    for i in range(2):
        calibration.observe(pull(truth, None, source=f"s{i}"), float(i))
    shown = calibration.snapshot()["fleet"]
    wide, unseen = shown["peer_bytes_per_s"], shown["storage_bytes_per_s"]
    assert wide["n"] == 2
    assert wide["interval"][0] < PROFILE.peer_bytes_per_s / 3
    assert wide["interval"][1] > wide["fit"]
    assert unseen["n"] == 0
    assert unseen["fit"] == unseen["prior"] == PROFILE.storage_bytes_per_s
    assert unseen["interval"][1] / unseen["interval"][0] > 100


def test_intervals_narrow_with_observations() -> None:
    calibration = Calibration(PROFILE)
    widths = []
    for i in range(64):
        calibration.observe(seen(CostModel(PROFILE)), float(i))
        low, high = calibration.snapshot()["workers"]["w"]["prefill_s_per_token"]["interval"]
        widths.append(high / low)
    assert widths[0] > 1.5 * widths[7] > 1.5 * widths[63]
