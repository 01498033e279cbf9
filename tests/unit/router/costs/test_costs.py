# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import pytest

from engine_ext.sim.profile import load_profile as load_engine_profile
from router.costs.model import CostModel
from router.costs.profile import NUMBERS, load_profile, profile_names
from router.errors import ConfigError


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads_and_names_its_source(name: str) -> None:
    profile = load_profile(name)
    assert len(profile.source) > 40
    assert all(getattr(profile, number) > 0 for number in NUMBERS)


@pytest.mark.parametrize(
    ("name", "overrides", "field"),
    [
        ("no-such", {}, "costs.profile"),
        ("default", {"no_such": 1.0}, "costs.overrides.no_such"),
        ("default", {"ram_start_s": 0.0}, "costs.overrides.ram_start_s"),
        ("default", {"ram_start_s": float("nan")}, "costs.overrides.ram_start_s"),
    ],
)
def test_bad_constant_is_refused_by_name(name: str, overrides: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_profile(name, overrides)
    assert caught.value.field == field


def test_override_replaces_one_constant() -> None:
    assert load_profile("default", {"admit_s": 0.5}).admit_s == 0.5


def test_formulas_are_those_of_the_docstring() -> None:
    p = load_profile("default")
    costs = CostModel(p)
    expected_s = (
        p.prefill_start_s + 100 * p.prefill_s_per_token + p.prefill_s_per_token_squared * 100 * (900 + 50)
    )
    assert costs.prefill_s(900, 100, 0) == pytest.approx(expected_s)
    assert costs.prefill_s(900, 100, 10) == pytest.approx(expected_s + 10 * p.decode_s_per_request)
    assert costs.decode_step_s(1) == p.decode_start_s
    assert costs.decode_step_s(21) == pytest.approx(p.decode_start_s + 20 * p.decode_s_per_request)
    size = 1000 * p.kv_bytes_per_token
    promotion_s = p.ram_start_s + size / p.ram_bytes_per_s
    assert costs.promotion_s(1000) == pytest.approx(promotion_s)
    pull_s = p.peer_lookup_s + 2 * size / p.peer_bytes_per_s + promotion_s
    assert costs.peer_s(1000, 1, connected=True) == pytest.approx(pull_s)
    assert costs.peer_s(1000, 1, connected=False) == pytest.approx(p.peer_connect_s + pull_s)
    assert costs.storage_s(1000) == pytest.approx(
        p.storage_start_s + size / p.storage_bytes_per_s + promotion_s
    )


def test_requests_that_decode_add_to_every_step_of_a_prefill() -> None:
    profile = load_profile("default")
    costs = CostModel(profile)

    def added_s(missing: float, decodes: int) -> float:
        return costs.prefill_s(0, missing, decodes) - costs.prefill_s(0, missing, 0)

    one_step_s = added_s(100, 8)
    assert one_step_s == pytest.approx(8 * profile.decode_s_per_request)
    assert added_s(profile.step_tokens, 8) == pytest.approx(one_step_s)
    assert added_s(5 * profile.step_tokens, 8) == pytest.approx(5 * one_step_s)
    assert added_s(5 * profile.step_tokens, 16) == pytest.approx(10 * one_step_s)
    # A long prompt is not stretched: with 64 requests beside it, by less than a tenth.
    assert added_s(60_000, 64) < 0.1 * costs.prefill_s(0, 60_000, 0)


@pytest.mark.parametrize(("exponent", "times"), [(1.0, 4.0), (0.5, 2.0), (1e-9, 1.0)])
def test_pulls_share_a_link_by_the_exponent(exponent: float, times: float) -> None:
    costs = CostModel(load_profile("default", {"peer_share_exponent": exponent}))
    alone_s, four_s = (costs.peer_s(8000, others, connected=True) for others in (0, 3))
    fixed_s = costs.profile.peer_lookup_s + costs.promotion_s(8000)
    assert four_s - fixed_s == pytest.approx(times * (alone_s - fixed_s))


def test_default_profile_shares_no_constant_with_the_simulator_it_is_judged_by() -> None:
    simulated = msgspec.to_builtins(load_engine_profile("default"))
    ours = load_profile("default")
    pairs = {
        "prefill_start_s": "step_base_s",
        "prefill_s_per_token": "prefill_s_per_token",
        "prefill_s_per_token_squared": "prefill_s_per_token_per_context_token",
        "decode_start_s": "step_base_s",
        "decode_s_per_request": "decode_s_per_sequence",
        "peer_lookup_s": "peer_lookup_s",
        "peer_bytes_per_s": "peer_bytes_per_s",
        "storage_bytes_per_s": "storage_read_bytes_per_s",
    }
    for name, theirs in pairs.items():
        assert getattr(ours, name) != simulated[theirs], name
    # Of one order of magnitude all the same: both describe an 8B model on one H100.
    assert 0.5 < ours.decode_start_s / simulated["step_base_s"] < 2
    in_context_s = simulated["decode_s_per_sequence"] + 4000 * simulated["decode_s_per_context_token"]
    assert 0.5 < ours.decode_s_per_request / in_context_s < 2


def test_nothing_to_load_costs_nothing() -> None:
    costs = CostModel(load_profile("default"))
    assert (costs.promotion_s(0), costs.peer_s(0, 3, connected=False), costs.storage_s(0)) == (0.0, 0.0, 0.0)


def test_splitting_a_prefill_costs_the_same_attention() -> None:
    costs = CostModel(load_profile("default", {"prefill_start_s": 1e-12}))
    whole = costs.prefill_s(0, 3000, 0)
    assert costs.prefill_s(0, 1000, 0) + costs.prefill_s(1000, 2000, 0) == pytest.approx(whole)
