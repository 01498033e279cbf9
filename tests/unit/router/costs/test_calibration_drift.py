# SPDX-License-Identifier: Apache-2.0
"""Outliers, drifts, failures: what is followed and what is not."""

from __future__ import annotations

from random import Random

import pytest
from cost_truth import PROFILE, SECONDS, pull, pull_s, seen, slower

from router.costs.calibration import Calibration
from router.costs.model import CostModel, Link


def test_an_outlier_moves_little() -> None:
    calibration = Calibration(PROFILE)
    truth = CostModel(PROFILE)
    for i in range(100):
        calibration.observe(seen(truth), float(i))
    before = calibration.model_for("w").prefill_s(0, 8000, 0)
    calibration.observe(seen(truth, noise=100.0), 101.0)
    assert calibration.model_for("w").prefill_s(0, 8000, 0) < 1.15 * before


def test_one_stall_in_ten_hardly_biases_the_fit() -> None:
    random = Random(3)
    calibration = Calibration(PROFILE)
    truth = CostModel(PROFILE)
    for i in range(400):
        noise = 50.0 if i % 10 == 9 else random.lognormvariate(0, 0.1)
        calibration.observe(seen(truth, noise=noise, prompt_tokens=random.randint(500, 20_000)), float(i))
    seconds = calibration.model_for("w").prefill_s(0, 8000, 0)
    assert seconds == pytest.approx(truth.prefill_s(0, 8000, 0), rel=0.15)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_worker_that_changes_is_followed_within_twenty_requests(factor: float) -> None:
    calibration = Calibration(PROFILE)
    for i in range(200):
        calibration.observe(seen(CostModel(PROFILE), prompt_tokens=1000 + 50 * i), float(i))
    changed = CostModel(slower(PROFILE, factor))
    for i in range(200, 220):
        calibration.observe(seen(changed, prompt_tokens=1000 + 500 * (i - 200)), float(i))
    seconds = calibration.model_for("w").prefill_s(0, 8000, 0)
    assert seconds == pytest.approx(changed.prefill_s(0, 8000, 0), rel=0.2)


def chosen_pulls(calibration: Calibration, link: Link, start_s: float, requests: int) -> list[bool]:
    """Requests of 16,000 tokens every 5 s: pull while that is predicted to be faster; others keep the fleet known."""
    random = Random(5)
    truth = CostModel(PROFILE)
    pulled = []
    for i in range(requests):
        now_s = start_s + 5.0 * i
        recompute_s = calibration.model_for("w").prefill_s(0, 16_000, 0)
        pulls = pull_s(calibration) < recompute_s
        noise = random.lognormvariate(0, 0.1)
        one = pull(truth, link, noise=noise) if pulls else seen(truth, prompt_tokens=16_000, noise=noise)
        calibration.observe(one, now_s)
        other = pull(truth, truth.link("", ""), source="t", worker="v", tokens=12_000)
        calibration.observe(other, now_s + 1)
        pulled.append(pulls)
    return pulled


def test_a_link_ten_times_slower_loses_its_pulls_and_is_tried_again_later() -> None:
    calibration = Calibration(PROFILE)
    usual = CostModel(PROFILE).link("s", "w")
    assert all(chosen_pulls(calibration, usual, 0.0, 60))
    slow = usual._replace(lookup_s=usual.lookup_s * 10, bytes_per_s=usual.bytes_per_s / 10)
    pulled = chosen_pulls(calibration, slow, 300.0, 400)
    assert pulled.index(False) <= 20
    tried_again = pulled.index(True, pulled.index(False))
    assert 10 < tried_again < 240, "after a minute at the least, within twenty at the most"
    after = pulled[pulled.index(False) :]
    assert sum(after) < len(after) / 10, "trying again must stay rare while the link is slow"
    assert pull_s(calibration, "t", "v") < calibration.model_for("v").prefill_s(0, 16_000, 0)
    again = chosen_pulls(calibration, usual, 300.0 + 5 * 400, 400)
    assert all(again[-100:]), "a link that recovered is used again"


def test_failed_pulls_count_against_the_link_alone() -> None:
    calibration = Calibration(PROFILE)
    truth = CostModel(PROFILE)
    for i in range(50):
        calibration.observe(pull(truth, None, source="s"), 2.0 * i)
        calibration.observe(pull(truth, None, source="t"), 2.0 * i + 1)
    before = calibration.model_for("w").prefill_s(0, 8000, 0)
    good = pull_s(calibration, "t")
    recompute_s = calibration.model_for("w").prefill_s(0, 16_000, 0)
    assert pull_s(calibration) < recompute_s
    for i in range(10):
        calibration.observe(pull(truth, None, failed=True), 100.0 + i)
    assert pull_s(calibration) > recompute_s
    assert pull_s(calibration, "t") == pytest.approx(good, rel=0.1)
    assert calibration.model_for("w").prefill_s(0, 8000, 0) == pytest.approx(before, rel=0.02)
    assert calibration.snapshot()["skipped"] == {"failed_pull": 10}


def test_stale_plans_and_long_queues_teach_nothing() -> None:
    calibration = Calibration(PROFILE)
    truth = CostModel(PROFILE)
    calibration.observe(seen(truth, planned_cached_tokens=4000, failed=True, noise=3.0), 0.0)
    calibration.observe(seen(truth, queue_s=5.0, noise=3.0), 1.0)
    assert calibration.model_for("w").profile == PROFILE
    shown = calibration.snapshot()
    assert shown["observations"] == 0
    assert shown["skipped"] == {"stale_plan": 1, "long_queue": 1}


def test_a_token_more_or_less_than_planned_is_as_planned() -> None:
    calibration = Calibration(PROFILE)
    for extra in (-1, 0, 1):
        one = pull(CostModel(PROFILE), None, cached_tokens=16_000 + extra)
        calibration.observe(one, float(extra + 1))
    assert calibration.observations == 3
    assert not calibration.skipped


@pytest.mark.parametrize("noise", [1e9, 1e-9])
def test_constants_stay_within_a_factor_of_fifty(noise: float) -> None:
    calibration = Calibration(PROFILE)
    for i in range(300):
        calibration.observe(pull(CostModel(PROFILE), None, noise=noise), float(i))
    found, link = calibration.model_for("w").profile, calibration.link("s", "w")
    ratios = [getattr(found, name) / getattr(PROFILE, name) for name in SECONDS]
    ratios += [link.bytes_per_s / PROFILE.peer_bytes_per_s, link.lookup_s / PROFILE.peer_lookup_s]
    assert all(1 / 50.001 < ratio < 50.001 for ratio in ratios), ratios


def test_a_worker_without_observations_returns_to_the_fleet_and_is_forgotten() -> None:
    calibration = Calibration(PROFILE)
    for i in range(100):
        calibration.observe(seen(CostModel(PROFILE), worker="a"), float(i))
        calibration.observe(seen(CostModel(slower(PROFILE, 2)), worker="b"), float(i))
    apart = calibration.model_for("b").prefill_s(0, 8000, 0) / calibration.model_for("a").prefill_s(
        0, 8000, 0
    )
    assert apart == pytest.approx(2, rel=0.2)
    for i in range(100, 20_000, 100):
        calibration.observe(seen(CostModel(PROFILE), worker="a"), float(i))
    assert "b" not in calibration.snapshot()["workers"]
    assert calibration.model_for("b").prefill_s(0, 8000, 0) == pytest.approx(
        calibration.model_for("a").prefill_s(0, 8000, 0), rel=0.15
    )
