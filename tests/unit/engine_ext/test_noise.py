# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import statistics
from random import Random

import pytest

from engine_ext.sim.noise import Noise


def test_factors_have_mean_one_and_the_spread_asked_for() -> None:
    noise = Noise(Random(1), step_sigma=0.2, transfer_sigma=0.5)
    steps = list(noise.step_factors(20_000))
    transfers = [noise.transfer_factor() for _ in range(20_000)]
    assert statistics.fmean(steps) == pytest.approx(1.0, abs=0.01)
    assert statistics.stdev(steps) == pytest.approx(0.2, rel=0.05)
    assert statistics.fmean(transfers) == pytest.approx(1.0, abs=0.02)
    assert statistics.stdev(transfers) == pytest.approx(0.5, rel=0.1)
    assert min(*steps, *transfers) > 0


def test_looking_ahead_changes_no_factor() -> None:
    near, far = (Noise(Random(3), step_sigma=0.3, transfer_sigma=0.3) for _ in range(2))
    taken = []
    for _ in range(20):
        taken += near.step_factors(1)
        near.steps_taken(1)
        near.transfer_factor()
    ahead = list(far.step_factors(50))
    far.steps_taken(7)
    assert taken == ahead[:20]
    assert list(far.step_factors(2)) == ahead[7:9]


def test_without_a_sigma_nothing_varies() -> None:
    noise = Noise(Random(1))
    assert list(noise.step_factors(3)) == [1.0] * 3
    assert noise.transfer_factor() == 1.0
    with pytest.raises(ValueError, match="at least 0"):
        Noise(Random(1), step_sigma=-0.1)
