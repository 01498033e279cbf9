# SPDX-License-Identifier: Apache-2.0
"""Spec, manager and worker of the extension on vLLM's own classes, in the engine's venv, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from .engineless import Scenario, scenarios
from .imports import Version
from .stage import Stage

pytestmark = pytest.mark.real

SCRIPT = Path(__file__).with_name("extension_scenarios.py")


@pytest.fixture
def scenario(real_stage: Stage, vllm_version: Version) -> Scenario:
    """`scenario(name)`: what that scenario of extension_scenarios.py came to under this version."""
    return scenarios(real_stage.home, SCRIPT, vllm_version)


def test_pages_go_both_ways_byte_for_byte_and_nothing_else_is_touched(scenario: Scenario) -> None:
    assert scenario("direct")["moved"] > 40_000


def test_canonical_pages_are_put_together_by_their_ranks_each_byte_written_once(scenario: Scenario) -> None:
    result = scenario("canonical")
    assert result["pages"]
    assert result["written"] == result["expected"]


def test_on_cuda_streams_a_transfer_is_reported_when_its_event_is_over(scenario: Scenario) -> None:
    result = scenario("streams")
    assert result["early"] == []
    assert result["results"] == [[3, 128, 0.002], [1, 128, 0.002], [2, 128, 0.002]]
    assert result["moved"]


def test_the_region_is_pinned_as_this_version_does_it(scenario: Scenario, vllm_version: Version) -> None:
    whole, own_slots = 4 * (8 << 20), 4 * (2 << 20)
    assert scenario("pinning") == {
        "direct": [True, whole if vllm_version == "0.32" else own_slots],
        "canonical": [True, whole],
    }


def test_the_manager_hands_out_no_chunk_in_quarantine(scenario: Scenario) -> None:
    result = scenario("manager")
    assert result["same"]
    assert result["primary"] == "ForgettingPrimaryTier"
    assert result["full_while_held"]
    assert result["again"] == [0, 1, 2, 3]
    assert result["view"] == [4, 4096]
    assert result["left"] == []


def test_blocks_of_an_adapter_that_was_replaced_are_hashed_apart_and_not_stored(scenario: Scenario) -> None:
    result = scenario("adapters")
    before, changed, between, reloaded, still, late, plain = result.pop("stored")
    assert (before, late, plain) == (2, 2, 2)
    assert (changed, between, reloaded, still) == (0, 0, 0, 0)
    assert result.pop("given_up") == [0, 2, 0]
    assert result == {
        "words": 3,
        "stock": ["lora", "tuned"],
        "told": [["tuned"]],
        "plain": [],
        "once": True,
        "decoded": True,
        "refused": ["refused"] * 3,
    }


def test_cached_blocks_of_former_weights_leave_the_prefix_cache_and_the_events_say_so(
    scenario: Scenario,
) -> None:
    assert scenario("cached") == {
        "told": [
            ["BlockStored 2", "BlockStored 2"],
            ["BlockRemoved 1", "BlockRemoved 1"],
            ["BlockStored 2", "BlockRemoved 1", "BlockRemoved 1"],
            ["BlockStored 2"],
        ],
        "cached": 4,
    }


def test_a_planned_request_reports_ram_promotion_and_what_was_evicted_unread(scenario: Scenario) -> None:
    result = scenario("reporting")
    assert result["first"] == ["HIT", "HIT_PENDING", "MISS"]
    assert result["again"] == ["HIT", "HIT"]
    (seconds,) = result["seconds"]
    assert 0 < seconds < 5
    assert result["chunk_bytes"] == 8192
    assert result["calls"] == [
        ["began", "planned", "p"],
        ["asked", "planned", "p", "ram", 3],
        ["answered", "planned", "ram", 1, 2, 0.0],
        ["promoted", "planned", 1, 8192],
        ["finished", "planned"],
        ["evicted", "planned", 1],
        ["close", 1.0],
    ]


def test_a_tier_that_cannot_be_built_leaves_nothing_behind(scenario: Scenario) -> None:
    assert scenario("broken") == {"said": "no tier today", "saw": True, "released": True, "left": []}


def test_hints_that_cannot_be_read_are_counted(scenario: Scenario) -> None:
    assert scenario("hints") == {"told": [0, 1, 1], "defined": True}


def test_a_start_that_cannot_work_is_refused_with_the_reason(scenario: Scenario) -> None:
    result = scenario("refusals")
    assert result["small"].startswith(
        "HostTierTooSmall: cpu_bytes_to_use is 100, one chunk of 1 blocks takes 4096"
    )
    assert result["small for a worker"] == result["small"]
    assert result["vllm"].startswith(
        "PromotionRefused: promotion: vllm, but vLLM's own copy does not run on cpu"
    )
    assert result["typo"] == "PromotionRefused: promotion is 'gpu'; it can be 'gpu_ops' or 'vllm'"
    assert result["elsewhere"].startswith("PromotionRefused: KV caches are on ['meta']")


def test_an_unknown_vllm_is_refused_by_name_unless_the_operator_allows_it(
    scenario: Scenario, vllm_version: Version
) -> None:
    result = scenario("unknown")
    assert "vLLM 0.99.1 is not supported" in result["said"]
    assert "0.32, 0.33" in result["said"]
    assert result["as"] == "0.33"


def test_the_plugin_registers_our_names_once_and_nothing_in_an_unknown_vllm(scenario: Scenario) -> None:
    result = scenario("unknown")
    assert result["unregistered"] == []
    ours = ["PointsmanOffloadingSpec", "PointsmanTier", "PointsmanStorageTier", "PointsmanPolicy"]
    assert result["registered"] == ours
    assert result["imported"] == [], "factories import a class when it is first asked for"
