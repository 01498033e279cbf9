# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

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
    assert costs.prefill_s(900, 100, 10) == pytest.approx(expected_s * (1 + 10 * p.decode_slowdown))
    size = 1000 * p.kv_bytes_per_token
    promotion_s = p.ram_start_s + size / p.ram_bytes_per_s
    assert costs.promotion_s(1000) == pytest.approx(promotion_s)
    pull_s = p.peer_lookup_s + 2 * size / p.peer_bytes_per_s + promotion_s
    assert costs.peer_s(1000, 1, connected=True) == pytest.approx(pull_s)
    assert costs.peer_s(1000, 1, connected=False) == pytest.approx(p.peer_connect_s + pull_s)
    assert costs.storage_s(1000) == pytest.approx(
        p.storage_start_s + size / p.storage_bytes_per_s + promotion_s
    )


def test_nothing_to_load_costs_nothing() -> None:
    costs = CostModel(load_profile("default"))
    assert (costs.promotion_s(0), costs.peer_s(0, 3, connected=False), costs.storage_s(0)) == (0.0, 0.0, 0.0)


def test_splitting_a_prefill_costs_the_same_attention() -> None:
    costs = CostModel(load_profile("default", {"prefill_start_s": 1e-12}))
    whole = costs.prefill_s(0, 3000, 0)
    assert costs.prefill_s(0, 1000, 0) + costs.prefill_s(1000, 2000, 0) == pytest.approx(whole)
