# SPDX-License-Identifier: Apache-2.0
"""PointsmanStorageTier below vLLM's own tiering manager, in the engine's venv, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from .engineless import Scenario, scenarios
from .imports import Version
from .stage import Stage

pytestmark = pytest.mark.real

SCRIPT = Path(__file__).with_name("storage_scenarios.py")


@pytest.fixture
def scenario(real_stage: Stage, vllm_version: Version) -> Scenario:
    """`scenario(name)`: what that scenario of storage_scenarios.py came to under this version."""
    return scenarios(real_stage.home, SCRIPT, vllm_version)


def test_what_ram_lost_comes_back_from_disk_and_a_restart_says_and_finds_it(scenario: Scenario) -> None:
    result = scenario("reload")
    assert result["in_ram"] == result["from_disk"] == result["restarted"] == [10, 0]
    assert result["heard"]
    assert result["reported"]
    assert result["ownerships"] == ["('PointsmanStorageTier', True, False)"]
    assert result["read_blocks"] == 10
    assert result["bytes"] == 10 * (64 + 4096)


def test_two_managers_on_one_small_directory_never_give_a_wrong_byte(scenario: Scenario) -> None:
    result = scenario("churn")
    assert result["wrong"] == 0
    assert result["came"] > 50
    assert result["evictions"] > 50
    assert result["kept"], "the capacity was exceeded"
    assert result["said"] == [True, True]
    assert result["ordered"]


def test_damaged_and_missing_files_are_computed_again(scenario: Scenario) -> None:
    result = scenario("damage")
    assert result["first"] == [4, 0]
    assert result["second"] == [6, 0]
    assert result["heard"]
    assert result["errors"] == {"errors:('defective',)": 1}


def test_tenants_and_hash_seeds_share_a_root_and_no_block(scenario: Scenario) -> None:
    assert scenario("tenants") == {"found": [4, 0, 0], "folders": 3}


def test_a_pinned_head_stays_and_a_private_tail_is_not_written(scenario: Scenario) -> None:
    assert scenario("hints") == {"stored": 4, "kept": 2, "size": 6}


def test_a_hung_read_costs_a_request_its_deadline_and_no_byte(scenario: Scenario) -> None:
    result = scenario("hung")
    assert result["first"] == [0, 0]
    assert result["quick"]
    assert result["others"] == [16, 0]
    assert result["later"] == [4, 0]


def test_a_start_that_cannot_work_is_refused_by_name(scenario: Scenario) -> None:
    result = scenario("refused")
    assert "unknown field `rootdir`" in result["typo"]
    assert "capacity_bytes is 100" in result["small"]
    assert "root_dir" in result["root"]
