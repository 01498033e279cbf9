# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from router.plan.pressure import MOST, Pressure


def test_idle_fleet_has_no_pressure() -> None:
    assert Pressure().weight == 0.0


@pytest.mark.parametrize(("busy", "weight"), [(0, 0.0), (2, 1 / 3), (4, 1.0), (8, MOST)])
def test_weight_is_that_of_the_queue(busy: int, weight: float) -> None:
    pressure = Pressure()
    pressure.observe(busy, 8)
    assert pressure.weight == pytest.approx(weight)


def test_weight_follows_the_load_smoothly() -> None:
    pressure = Pressure()
    for _ in range(1000):
        pressure.observe(4, 8)
    pressure.observe(8, 8)
    assert 1.0 < pressure.weight < 1.1
    for _ in range(1000):
        pressure.observe(0, 8)
    assert pressure.weight < 0.001
