# SPDX-License-Identifier: Apache-2.0
"""What is learnt about the time per output token, and how links are shared."""

from __future__ import annotations

import dataclasses
import time
from random import Random

import msgspec
import pytest
from cost_truth import PROFILE, answered, decoding, pull, seen

from router.costs.calibration import Calibration
from router.costs.model import CostModel


@pytest.mark.parametrize(("start", "request_factor"), [(4.0, 4.0), (0.25, 4.0), (4.0, 0.25)])
def test_the_time_per_output_token_is_learnt_from_answers(start: float, request_factor: float) -> None:
    random = Random(2)
    truth = decoding(PROFILE, start, request_factor)
    calibration = Calibration(PROFILE)
    for i in range(300):
        decodes, noise = random.uniform(1, 60), random.lognormvariate(0, 0.1)
        # A third of the time goes to prefills beside it, or none.
        beside_s = random.choice((0.0, 0.5)) * 199 * truth.decode_step_s(round(decodes))
        one = answered(truth, decodes=decodes, prefill_s=beside_s, noise=noise)
        calibration.observe_decode(one, float(i))
    assert calibration.decode_observations > 250
    for decodes in (1, 10, 50):
        expected_s = truth.decode_step_s(decodes)
        assert calibration.model_for("w").decode_step_s(decodes) == pytest.approx(expected_s, rel=0.1), (
            decodes
        )
    # The other constants have nothing to do with it.
    assert calibration.model_for("w").prefill_s(0, 8000, 0) == pytest.approx(
        CostModel(PROFILE).prefill_s(0, 8000, 0), rel=1e-6
    )


def test_one_stalled_client_hardly_moves_the_time_per_output_token() -> None:
    calibration = Calibration(PROFILE)
    truth = CostModel(PROFILE)
    for i in range(100):
        calibration.observe_decode(answered(truth, decodes=1.0 + i % 20), float(i))
    calibration.observe_decode(answered(truth, decodes=5.0, noise=100.0), 100.0)
    assert calibration.model_for("w").decode_step_s(5) == pytest.approx(truth.decode_step_s(5), rel=0.1)


def test_a_worker_that_decodes_slower_is_followed_although_its_prefills_are_as_before() -> None:
    calibration = Calibration(PROFILE)
    truth, slow = CostModel(PROFILE), decoding(PROFILE, 3.0, 3.0)
    for i in range(200):
        calibration.observe(seen(truth, prompt_tokens=1000 + 50 * i), float(i))
        calibration.observe_decode(answered(truth, decodes=1.0 + i % 20), i + 0.5)
    for i in range(200, 220):
        calibration.observe(seen(truth, prompt_tokens=1000 + 500 * (i - 200)), float(i))
        calibration.observe_decode(answered(slow, decodes=1.0 + i % 20), i + 0.5)
    assert calibration.model_for("w").decode_step_s(10) == pytest.approx(slow.decode_step_s(10), rel=0.2)
    expected_s = truth.prefill_s(0, 8000, 0)
    assert calibration.model_for("w").prefill_s(0, 8000, 0) == pytest.approx(expected_s, rel=0.1)


def test_short_answers_and_those_beside_long_prefills_teach_nothing_of_decoding() -> None:
    calibration = Calibration(PROFILE)
    truth = CostModel(PROFILE)
    calibration.observe_decode(answered(truth, output_tokens=3, noise=9.0), 0.0)
    calibration.observe_decode(answered(truth, prefill_s=20.0, noise=9.0), 1.0)
    assert calibration.model_for("w").profile == PROFILE
    assert calibration.snapshot()["skipped"] == {"short_answer": 1, "beside_prefills": 1}


@pytest.mark.parametrize("exponent", [0.4, 1.6])
def test_how_links_are_shared_is_learnt_for_the_fleet(exponent: float) -> None:
    random = Random(3)
    truth = CostModel(msgspec.structs.replace(PROFILE, peer_share_exponent=exponent))
    calibration = Calibration(PROFILE)
    for i in range(200):
        one = pull(
            truth,
            None,
            source=f"s{i % 4}",
            tokens=random.randrange(8000, 60_000),
            other_pulls=random.randrange(6),
            noise=random.lognormvariate(0, 0.1),
        )
        calibration.observe(one, float(i))
    assert calibration.link("s0", "w").share_exponent == pytest.approx(exponent, rel=0.2)
    # A link that was never seen too.
    assert calibration.link("new", "w").share_exponent == pytest.approx(exponent, rel=0.2)
    assert calibration.link("s0", "w").bytes_per_s == pytest.approx(PROFILE.peer_bytes_per_s, rel=0.2)
    shown = calibration.snapshot()["fleet"]["peer_share_exponent"]
    assert shown["prior"] == 1.0
    assert shown["n"] > 20
    assert shown["interval"][0] < exponent < shown["interval"][1]


def test_blocks_that_a_prefill_worker_hands_over_teach_nothing() -> None:
    calibration = Calibration(PROFILE)
    handed_over = dataclasses.replace(pull(CostModel(PROFILE), None, noise=9.0), source=None)
    calibration.observe(handed_over, 0.0)
    assert calibration.model_for("w").profile == PROFILE
    assert calibration.snapshot()["skipped"] == {"handed_over": 1}


def test_doubts_shrink_with_what_is_observed_and_grow_again_without() -> None:
    calibration = Calibration(PROFILE)
    truth = CostModel(PROFILE)
    at_first = calibration.doubts("w", "s", 0.1)
    assert at_first.peer > 1.4
    for i in range(20):
        calibration.observe(pull(truth, None, tokens=4000 + 1000 * i), float(i))
    known, other = calibration.doubts("w", "s", 0.1), calibration.doubts("w", "t", 0.1)
    assert known.peer < 0.4
    assert known.peer < 0.6 * other.peer
    assert other.peer < 0.7 * at_first.peer, "the fleet's constants are known by now"
    assert known.ram < at_first.ram
    assert known.storage == pytest.approx(at_first.storage, rel=0.01)
    for i in range(100):
        calibration.observe(seen(truth, worker="v"), 20.0 + 10 * i)
    assert calibration.doubts("w", "s", 0.1).peer > 1.3 * known.peer


def test_observing_and_asking_are_cheap() -> None:
    calibration = Calibration(PROFILE)
    rows = [pull(CostModel(PROFILE), None, source=f"s{i % 8}", tokens=1000 + 10 * i) for i in range(1000)]
    for i, row in enumerate(rows):
        calibration.observe(row, i * 0.01)
    started_s = time.process_time()
    for i, row in enumerate(rows):
        calibration.observe(row, 10 + i * 0.01)
    observed_s = (time.process_time() - started_s) / len(rows)
    started_s = time.process_time()
    for _ in range(10_000):
        calibration.model_for("w")
    asked_s = (time.process_time() - started_s) / 10_000
    print(f"observe {observed_s * 1e6:.1f} us, model_for {asked_s * 1e6:.2f} us")
    # Ten times what an idle core needs: this catches another order, not a busy machine.
    assert observed_s < 500e-6
    assert asked_s < 5e-6
