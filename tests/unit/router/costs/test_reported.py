# SPDX-License-Identifier: Apache-2.0
"""What is learnt from the parts of loads that engine extensions measure."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from cost_truth import PROFILE, slower

from router.costs.calibration import Calibration
from router.costs.model import CostModel
from router.costs.observation import PullObservation, TierObservation
from router.costs.profile import CostProfile

TOKENS = 16_000


def pull(truth: CostProfile, noise: float = 1.0, **fields: object) -> PullObservation:
    """A pull over a link with these constants."""
    values: dict[str, object] = {
        "source": "s",
        "worker": "w",
        "tokens": TOKENS,
        "lookup_s": truth.peer_lookup_s * noise,
        "transfer_s": TOKENS * truth.kv_bytes_per_token / truth.peer_bytes_per_s * noise,
        "failed": False,
        "other_pulls": 0,
        "connected": True,
    }
    return PullObservation(**(values | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_link_is_found_from_its_parts_among_noise(factor: float) -> None:
    random = Random(1)
    calibration = Calibration(slower(PROFILE, factor))
    for number in range(40):
        calibration.observe_pull(pull(PROFILE, random.lognormvariate(0, 0.2)), float(number))
    link = calibration.link("s", "w")
    assert link.bytes_per_s == pytest.approx(PROFILE.peer_bytes_per_s, rel=0.15)
    assert link.lookup_s == pytest.approx(PROFILE.peer_lookup_s, rel=0.3)
    assert calibration.reported == 40
    wrong = slower(PROFILE, factor)
    assert calibration.model_for("w").profile.prefill_s_per_token == wrong.prefill_s_per_token


def test_connecting_is_learnt_only_where_there_was_no_session() -> None:
    calibration = Calibration(PROFILE)
    for number in range(30):
        seconds = PROFILE.peer_lookup_s + 3 * PROFILE.peer_connect_s
        calibration.observe_pull(pull(PROFILE, connected=False, lookup_s=seconds), 2.0 * number)
        calibration.observe_pull(pull(PROFILE), 2.0 * number + 1)
    link = calibration.link("s", "w")
    assert link.connect_s == pytest.approx(3 * PROFILE.peer_connect_s, rel=0.3)
    assert link.lookup_s == pytest.approx(PROFILE.peer_lookup_s, rel=0.3)


def test_pulls_that_share_a_link_do_not_make_it_slow() -> None:
    calibration = Calibration(PROFILE)
    alone_s = TOKENS * PROFILE.kv_bytes_per_token / PROFILE.peer_bytes_per_s
    for number in range(30):
        shared_s = alone_s * 4**PROFILE.peer_share_exponent
        calibration.observe_pull(pull(PROFILE, transfer_s=shared_s, other_pulls=3), float(number))
    assert calibration.link("s", "w").bytes_per_s == pytest.approx(PROFILE.peer_bytes_per_s, rel=0.02)


def test_one_outlier_among_many_moves_little() -> None:
    calibration = Calibration(PROFILE)
    for number in range(30):
        calibration.observe_pull(pull(PROFILE), float(number))
    calibration.observe_pull(pull(PROFILE, noise=1000.0), 30.0)
    assert calibration.link("s", "w").bytes_per_s > PROFILE.peer_bytes_per_s / 1.5


def test_a_link_that_slows_is_followed_and_others_are_left_alone() -> None:
    calibration = Calibration(PROFILE)
    for number in range(30):
        for source in ("s", "t", "u", "v"):
            calibration.observe_pull(pull(PROFILE, source=source), float(number))
    for number in range(30, 50):
        calibration.observe_pull(pull(PROFILE, noise=10.0), float(number))
        for source in ("t", "u", "v"):
            calibration.observe_pull(pull(PROFILE, source=source), float(number))
    assert calibration.link("s", "w").bytes_per_s == pytest.approx(PROFILE.peer_bytes_per_s / 10, rel=0.3)
    assert calibration.link("t", "w").bytes_per_s == pytest.approx(PROFILE.peer_bytes_per_s, rel=0.2)


def test_a_pull_that_failed_counts_as_slow_for_its_link_alone() -> None:
    calibration = Calibration(PROFILE)
    failed = pull(PROFILE, failed=True, lookup_s=None, transfer_s=None, tokens=0)
    for number in range(3):
        calibration.observe_pull(failed, float(number))
    assert calibration.link("s", "w").bytes_per_s < PROFILE.peer_bytes_per_s / 3
    assert calibration.link("t", "w").bytes_per_s == PROFILE.peer_bytes_per_s


def test_planning_is_told_of_what_moved() -> None:
    calibration = Calibration(PROFILE)
    changes = calibration.watch()
    before = calibration.link("s", "w")
    calibration.observe_pull(pull(PROFILE, noise=8.0), 1.0)
    assert changes.everything or ("s", "w") in changes.links
    assert calibration.link("s", "w") != before


@pytest.mark.parametrize("tier", ["ram", "storage"])
def test_a_tier_is_found_and_the_other_left_alone(tier: str) -> None:
    truth = CostModel(PROFILE)
    promotion_s = truth.promotion_s(TOKENS)
    seconds = promotion_s if tier == "ram" else truth.storage_s(TOKENS) - promotion_s
    wrong = {"ram_start_s": PROFILE.ram_start_s * 4, "ram_bytes_per_s": PROFILE.ram_bytes_per_s / 4}
    if tier == "storage":
        wrong = {
            "storage_start_s": PROFILE.storage_start_s * 4,
            "storage_bytes_per_s": PROFILE.storage_bytes_per_s / 4,
        }
    calibration = Calibration(msgspec.structs.replace(PROFILE, **wrong))
    for number in range(40):
        calibration.observe_tier(TierObservation("w", tier, TOKENS, seconds), float(number))  # type: ignore[arg-type]
    found = calibration.model_for("w")
    assert found.promotion_s(TOKENS) == pytest.approx(promotion_s, rel=0.1)
    assert found.storage_s(TOKENS) == pytest.approx(truth.storage_s(TOKENS), rel=0.1)


def test_what_says_nothing_is_not_counted() -> None:
    calibration = Calibration(PROFILE)
    calibration.observe_tier(TierObservation("w", "ram", 0, 0.5), 1.0)
    calibration.observe_pull(pull(PROFILE, tokens=0, lookup_s=None, transfer_s=None), 1.0)
    assert calibration.reported == 0
    snapshot = calibration.snapshot()
    assert (snapshot["reported"], snapshot["links"]) == (0, [])
