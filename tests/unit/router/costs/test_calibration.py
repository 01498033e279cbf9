# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import math
import time
from random import Random
from typing import Any

import msgspec
import pytest

from router.costs.calibration import Calibration
from router.costs.calibration_state import CalibrationState
from router.costs.model import CostModel, Link
from router.costs.observation import DecodeObservation, Observation
from router.costs.profile import CostProfile, load_profile

PROFILE = load_profile("llama-3.1-8b-h100")
SECONDS = ("admit_s", "prefill_start_s", "prefill_s_per_token", "prefill_s_per_token_squared")


def slower(profile: CostProfile, factor: float) -> CostProfile:
    """The same machine with every second ``factor`` times longer."""
    changes = {name: getattr(profile, name) * factor for name in SECONDS} | {
        "ram_start_s": profile.ram_start_s * factor,
        "ram_bytes_per_s": profile.ram_bytes_per_s / factor,
        "peer_connect_s": profile.peer_connect_s * factor,
        "peer_lookup_s": profile.peer_lookup_s * factor,
        "peer_bytes_per_s": profile.peer_bytes_per_s / factor,
    }
    return msgspec.structs.replace(profile, **changes)


def seen(
    truth: CostModel, link: Link | None = None, *, noise: float = 1.0, failed: bool = False, **fields: Any
) -> Observation:
    """What a worker with the constants of ``truth`` would show."""
    values: dict[str, Any] = {
        "worker": "w",
        "source": None,
        "prompt_tokens": 8000,
        "ram_tokens": 0,
        "peer_tokens": 0,
        "storage_tokens": 0,
        "planned_cached_tokens": 0,
        "decodes": 0,
        "other_pulls": 0,
        "connected": True,
        "queue_s": 0.0,
    } | fields
    cached = 0 if failed else values["planned_cached_tokens"]
    missing = max(values["prompt_tokens"] - cached, 1)
    load_s = truth.profile.admit_s + truth.promotion_s(values["ram_tokens"])
    load_s += truth.storage_s(values["storage_tokens"])
    load_s += truth.peer_s(
        values["peer_tokens"], values["other_pulls"], connected=values["connected"], link=link
    )
    ttft_s = max(values["queue_s"], load_s) + truth.prefill_s(
        values["prompt_tokens"] - missing, missing, values["decodes"]
    )
    defaults = {"cached_tokens": cached, "ttft_s": ttft_s * noise}
    return Observation(**defaults | values)


def pull(truth: CostModel, link: Link | None, source: str = "s", **fields: Any) -> Observation:
    tokens = fields.pop("tokens", 16_000)
    return seen(
        truth,
        link,
        source=source,
        prompt_tokens=tokens,
        peer_tokens=tokens,
        planned_cached_tokens=tokens,
        **fields,
    )


def pull_s(calibration: Calibration, source: str = "s", worker: str = "w", tokens: int = 16_000) -> float:
    link = calibration.link(source, worker)
    return calibration.model_for(worker).peer_s(tokens, 0, connected=True, link=link)


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


def answered(truth: CostModel, *, noise: float = 1.0, **fields: Any) -> DecodeObservation:
    """How long an answer takes after its first token, on a worker with the constants of ``truth``."""
    values: dict[str, Any] = {"worker": "w", "decodes": 1.0, "output_tokens": 200, "prefill_s": 0.0} | fields
    steps = values["output_tokens"] - 1
    profile = truth.profile
    step_s = profile.decode_start_s + profile.decode_s_per_request * (values["decodes"] - 1)
    return DecodeObservation(**{"decode_s": (steps * step_s + values["prefill_s"]) * noise} | values)


def decoding(profile: CostProfile, start: float, request: float) -> CostModel:
    changes = {
        "decode_start_s": profile.decode_start_s * start,
        "decode_s_per_request": profile.decode_s_per_request * request,
    }
    return CostModel(msgspec.structs.replace(profile, **changes))


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
