# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.vllm.storage.value import PINNED_FACTOR, Pace, Use, weights_of

HALF_LIFE_S = 3600.0
uses = st.builds(Use, st.integers(0, 2**33), st.floats(0, 1e9, allow_subnormal=False), st.integers(0, 5000))


@given(uses)
def test_a_files_time_keeps_a_use_to_half_a_percent(use: Use) -> None:
    back = Use.from_mtime_ns(use.to_mtime_ns())
    assert back.last_use_s == use.last_use_s
    assert back.depth == min(use.depth, 999)
    assert back.worth == pytest.approx(max(use.worth, 2.0**-32), rel=0.005)
    assert back.to_mtime_ns() == use.to_mtime_ns()


@given(st.integers(0, 2**62))
def test_any_time_of_a_file_can_be_read(mtime_ns: int) -> None:
    use = Use.from_mtime_ns(mtime_ns)
    assert math.isfinite(use.score(1000, HALF_LIFE_S))
    assert use.again(0, 1.0, HALF_LIFE_S).last_use_s == use.last_use_s


def test_worth_halves_every_half_life_and_grows_with_each_use() -> None:
    use = Use(0, 4.0, 0).again(HALF_LIFE_S, 1.0, HALF_LIFE_S)
    assert use == Use(3600, 3.0, 0)


@given(uses, uses, st.floats(0, 1e6))
def test_order_is_that_of_faded_worth_at_any_later_moment(one: Use, other: Use, later_s: float) -> None:
    now_s = max(one.last_use_s, other.last_use_s) + later_s
    logs = [
        math.log2(max(use.worth, 2.0**-32)) - (now_s - use.last_use_s) / HALF_LIFE_S for use in (one, other)
    ]
    scores = [use.score(1000, HALF_LIFE_S) for use in (one, other)]
    if abs(logs[0] - logs[1]) > 1e-6:
        assert (scores[0] < scores[1]) == (logs[0] < logs[1])


def test_of_equal_uses_the_larger_file_is_worth_less() -> None:
    assert Use(0, 1.0, 0).score(2000, HALF_LIFE_S) < Use(0, 1.0, 0).score(1000, HALF_LIFE_S)


def test_expected_uses_and_pins_add_weight() -> None:
    plain, wanted = weights_of([0], 0.5), weights_of([0, 1, 2], 0.5, expected_uses=3.0, pinned_blocks=2)
    assert [one.rebuild_s for one in plain] == [0.5]
    assert [one.rebuild_s for one in wanted] == [2.0 * PINNED_FACTOR, 2.0 * PINNED_FACTOR, 2.0]
    assert [one.depth for one in wanted] == [0, 1, 2]


def test_the_half_life_follows_the_pace_of_writing() -> None:
    pace = Pace(capacity_bytes=800, turnovers=0.5, most_s=3600.0)
    assert not pace.note(1000.0, 0)
    assert not pace.note(1001.0, 99)
    assert pace.half_life_s == 3600.0, "too little was written to tell"
    assert pace.note(1010.0, 100)
    assert pace.half_life_s == 40.0, "half of the 80 s in which 800 bytes are written"
    assert not pace.note(1021.0, 200), "a tenth more is no other pace"
    assert pace.note(1022.0, 400)
    assert pace.half_life_s == 2.0


def test_a_half_life_has_bounds_and_a_ledger_may_start_anew() -> None:
    pace = Pace(800, 0.5, 3600.0)
    pace.note(0.0, 10_000)
    assert not pace.note(1.0, 0), "another ledger"
    assert not pace.note(1e6, 100), "at most an hour, as at first"
    assert pace.note(1e6, 300)
    assert pace.half_life_s == 1.0
    fixed = Pace(800, 0.0, 3600.0)
    assert not fixed.note(0.0, 0)
    assert not fixed.note(1.0, 10_000)
