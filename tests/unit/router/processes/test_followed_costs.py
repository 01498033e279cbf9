# SPDX-License-Identifier: Apache-2.0
"""What the keeper learnt is what a serving process prices with."""

from __future__ import annotations

import pytest

from router.costs.calibration import Calibration
from router.costs.observation import DecodeObservation, PullObservation
from router.costs.profile import load_profile
from router.processes.followed_costs import CostsSeen, FollowedCalibration
from router.processes.seen import DecodeSeen, PullSeen


def decode(worker: str = "a", decode_s: float = 4.0) -> DecodeObservation:
    return DecodeObservation(worker=worker, decodes=1.0, output_tokens=101, decode_s=decode_s, prefill_s=0.0)


def pull(seconds: float) -> PullObservation:
    return PullObservation(
        source="b", worker="a", tokens=4096, lookup_s=0.001, transfer_s=seconds, failed=False, other_pulls=1.0, connected=True
    )  # fmt: skip


def copy(keeper: Calibration, to: FollowedCalibration, now_s: float) -> None:
    to.put_fleet(*keeper.dump_fleet(now_s))
    for name in ("a", "b"):
        to.put_worker(name, keeper.dump_worker(name, now_s))
    to.put_link("b", "a", keeper.dump_link("b", "a", now_s))


def test_observations_go_to_the_keeper_and_change_nothing_here() -> None:
    told: list[CostsSeen] = []
    one = FollowedCalibration(load_profile("default"), told.append, lambda: 0.0)
    before = one.model_for("a").profile
    one.observe_decode(decode(), 1.0)
    one.observe_pull(pull(1.0), 2.0)
    assert told == [DecodeSeen(decode(), 1.0), PullSeen(pull(1.0), 2.0)]
    assert one.model_for("a").profile == before


def test_constants_follow_those_of_the_keeper() -> None:
    profile = load_profile("default")
    keeper, one = Calibration(profile), FollowedCalibration(profile, lambda _: None, lambda: 50.0)
    changes = one.watch()
    changes.everything = False
    for i in range(20):
        keeper.observe_decode(decode(), float(i))
        keeper.observe_pull(pull(0.5), float(i))
    copy(keeper, one, 50.0)
    assert one.model_for("a").profile.decode_start_s == pytest.approx(
        keeper.model_for("a").profile.decode_start_s, rel=0.02
    )
    assert one.link("b", "a").bytes_per_s == pytest.approx(keeper.link("b", "a").bytes_per_s, rel=0.02)
    assert changes.everything
    assert one.doubts("a", "b", 1.0) == pytest.approx(keeper.doubts("a", "b", 1.0), rel=0.05)
    assert profile.decode_start_s != one.model_for("a").profile.decode_start_s


def test_what_is_like_the_rest_again_is_priced_like_the_rest() -> None:
    profile = load_profile("default")
    keeper, one = Calibration(profile), FollowedCalibration(profile, lambda _: None, lambda: 50.0)
    for i in range(20):
        keeper.observe_decode(decode(), float(i))
    copy(keeper, one, 50.0)
    one.put_worker("a", None)
    assert one.model_for("a") is one.model_for("somebody")
