# SPDX-License-Identifier: Apache-2.0
"""Real links between processes of this machine: who gets which bytes, and what no failure changes about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .scenarios import Scenario, playing
from .stage import Stage

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def scenario(real_stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenario]:
    """`scenario(name)`: what that scenario of control_rounds.py came to."""
    with playing(real_stage.home, "control_rounds.py", tmp_path_factory.mktemp("control") / "log") as play:
        yield play


def test_keys_of_two_sources_arrive_byte_for_byte_and_every_lease_ends_as_read(scenario: Scenario) -> None:
    result = scenario("pulls")
    assert (result["pulled"], result["failed"], result["wrong_blocks"]) == (50, 0, 0)
    assert (result["asked"], result["read"]) == (50, 50)
    assert result["idle"]


def test_every_field_of_the_fingerprint_is_refused_by_its_name_before_any_byte_moves(
    scenario: Scenario,
) -> None:
    result = scenario("refusals")
    names = {"block_length_bytes": "block_length"}
    assert len(result["names"]) == 8
    for field, said in result["names"].items():
        assert said == ["refused", names.get(field, field), "lease", True]
    assert result["asked"] == 0


def test_addresses_without_a_peer_cost_little_and_the_reader_lives(scenario: Scenario) -> None:
    result = scenario("dead_addresses")
    assert {reason for reason, _ in result["results"].values()} == {"unreachable"}
    assert all(seconds < 10 for _, seconds in result["results"].values()), "not the find's deadline"
    assert result["lives"]


def test_a_source_that_restarts_twenty_times_at_its_address_never_mixes_its_lives(scenario: Scenario) -> None:
    result = scenario("restarts")
    assert (result["pulled"], result["wrong_blocks"]) == (20, 0)
    assert max(result["asked_per_life"]) <= 3
    assert set(result["not_found"]) <= {"unreachable", "peer_restarted"}
    assert set(result["not_pulled"]) <= {"peer_gone", "peer_restarted", "lease", "deadline"}
    assert (result["transfers_after"], result["quarantined_after"], result["finds_after"]) == (0, 0, 0)


def test_a_source_that_is_back_at_once_is_known_by_its_first_word(scenario: Scenario) -> None:
    result = scenario("quick_restart")
    assert result["stale"] in ("peer_restarted", "peer_gone", "lease")
    assert result["stale_s"] < 4
    assert len(result["not_found"]) <= 1
    assert result["pulled"]
    assert result["right"]


def test_lookups_at_a_source_that_stands_still_end_at_their_deadlines(scenario: Scenario) -> None:
    result = scenario("frozen_source")
    assert len(result["frozen"]) == 3
    assert set(result["frozen"]) <= {"deadline", "unreachable"}
    assert result["seconds"] < 10
    assert result["pulled"]


def test_a_reader_that_was_stopped_past_its_lease_discards_what_it_read(scenario: Scenario) -> None:
    rounds = scenario("frozen_reader")["rounds"]
    assert len(rounds) == 4
    for one in rounds:
        assert one["reason"] in ("lease", "deadline", "pulled")
        assert one["wrong"] == 0
        assert one["held_s"] < 10
        if one["reason"] != "pulled":
            assert one["used"] == 0
    assert any(one["reason"] == "lease" for one in rounds)
    assert any(0 < one["old"] < 512 for one in rounds), "it was stopped in the middle"


def test_a_reader_that_is_killed_mid_pull_leaves_the_source_to_others_and_its_lease_ends(
    scenario: Scenario,
) -> None:
    result = scenario("dead_reader")
    assert result["lease_kept"] == 1, "nobody said that it is not needed"
    assert result["pulled"]
    assert result["wrong_blocks"] == 0
    assert result["told"] == {"asked": 2, "ended": 2, "read": 1, "leases": 0}
    assert result["alive"]


def test_blocks_of_an_aborted_pull_are_reused_only_when_nothing_can_land_in_them(scenario: Scenario) -> None:
    result = scenario("abort_and_reuse")
    assert result["held"] > 0
    assert result["busy"] > 0
    assert result["wrong_blocks"] == 0
    assert (result["transfers_after"], result["quarantined_after"]) == (0, 0)


def test_an_idle_link_costs_next_to_nothing(scenario: Scenario) -> None:
    result = scenario("idle")
    assert result["right"]
    assert result["cores"] < 0.02
