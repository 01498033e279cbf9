# SPDX-License-Identifier: Apache-2.0
"""Real NIXL between processes of this machine: what a reader gets, and what it never gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .scenarios import Scenario, playing
from .stage import Stage

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def scenario(real_stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenario]:
    """`scenario(name)`: what that scenario of transfer_rounds.py came to."""
    with playing(real_stage.home, "transfer_rounds.py", tmp_path_factory.mktemp("transfer") / "log") as play:
        yield play


@pytest.mark.parametrize("name", ["lists", "lists_tcp"])
def test_random_block_lists_from_two_sources_arrive_byte_for_byte(scenario: Scenario, name: str) -> None:
    result = scenario(name)
    assert result["pulled"] > 10
    assert (result["failed"], result["wrong_blocks"]) == (0, 0)


def test_a_source_killed_mid_pull_leaves_blocks_that_settle_and_its_successor_serves_them(
    scenario: Scenario,
) -> None:
    result = scenario("killed")
    assert result["reason"] in ("peer_gone", "deadline")
    assert result["seconds"] < 21
    assert result["arrived"] > 0
    assert result["quarantined"] > 0
    assert result["held"], "quarantined blocks are held until they are released"
    assert set(result["proofs"]) <= {"connection_ended", "agent_destroyed"}
    assert result["proofs"]
    assert (result["transfers_after"], result["quarantined_after"]) == (0, 0)
    assert result["stale"] == ["stale_boot"]
    assert len(result["fresh"]) == 1
    assert result["wrong_blocks"] == 0


def test_bytes_of_a_source_that_thaws_after_the_deadline_never_land_in_a_reused_block(
    scenario: Scenario,
) -> None:
    result = scenario("late")
    assert result["reason"] == "deadline"
    assert result["untouched_at_deadline"], "the pull failed before its bytes came"
    assert result["quarantined"] == list(range(16))
    assert result["reuse"] == "destination_busy"
    assert result["landed_late"] == 16, "the late write is real"
    assert result["proofs"] == ["finished"]
    assert (result["wrong_blocks"], result["transfers_after"]) == (0, 0)


def test_a_transfer_that_never_ends_is_proved_over_by_destroying_its_agent(
    scenario: Scenario,
) -> None:
    result = scenario("endless")
    assert result["reason"] == "deadline"
    assert result["proofs"] == ["agent_destroyed"]
    assert result["agents_destroyed"] == 1
    assert result["untouched"], "nothing lands after the proof, the source thawed or not"
    assert result["pulled_after"]
    assert (result["wrong_blocks"], result["transfers_after"], result["agents"]) == (0, 0, 1)


def test_a_source_that_restarts_at_its_address_is_always_read_in_its_present_life(
    scenario: Scenario,
) -> None:
    result = scenario("restarts")
    assert set(result["reasons"]) <= {"peer_gone", "deadline", "pulled"}
    assert (result["wrong_blocks"], result["transfers_after"]) == (0, 0)


def test_ten_thousand_transfers_leave_nothing_behind(scenario: Scenario) -> None:
    result = scenario("many")
    assert (result["pulled"], result["failed"]) == (12_000, 0)
    assert (result["transfers_after"], result["open_blocks_after"]) == (0, 0)
    for before, after in (("before", "after"), ("node_before", "node_after")):
        was, now = result[before], result[after]
        assert (now["descriptors"], now["threads"]) == (was["descriptors"], was["threads"])
        assert now["rss_kib"] - was["rss_kib"] < 8 << 10


def test_a_failed_registration_leaves_nothing_behind(scenario: Scenario) -> None:
    result = scenario("rollback")
    assert result["errors"] == ["register with UCX", "create backend NOPE"]
    was, now = result["before"], result["after"]
    assert (now["descriptors"], now["threads"]) == (was["descriptors"], was["threads"])


def test_a_pull_from_an_address_where_nobody_is_any_more_fails_at_once(
    scenario: Scenario,
) -> None:
    result = scenario("dead_address")
    assert result["reason"] in ("agent", "peer_gone")
    assert result["seconds"] < 10
    assert result["free"]


def test_a_reader_killed_mid_pull_leaves_the_source_to_others(scenario: Scenario) -> None:
    assert scenario("dead_reader") == {"pulled": True, "alive": True, "wrong_blocks": 0}


def test_an_idle_agent_and_an_idle_thread_cost_next_to_nothing(scenario: Scenario) -> None:
    result = scenario("idle")
    assert result["right"]
    assert result["closed"]
    assert result["source_cores"] < 0.02
    assert result["reader_cores"] < 0.02
