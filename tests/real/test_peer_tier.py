# SPDX-License-Identifier: Apache-2.0
"""The peer tier between real tiering managers of vLLM, without an engine: what comes, what is refused, what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from .engineless import command, environment
from .imports import Version
from .stage import Stage

pytestmark = pytest.mark.real

Result = dict[str, Any]
Scenario = Callable[..., Result]
SCRIPT = Path(__file__).with_name("peer_tier_rounds.py")
DEADLINE_S = 3.0
"""Of the plans in the scenarios with a killed source."""


class Player:
    """A process that plays scenarios under one version of vLLM."""

    def __init__(self, home: Path, version: Version, log: IO[bytes]) -> None:
        self.log = log
        self.process = subprocess.Popen(
            command(home, SCRIPT),
            env=environment(home, version),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    def play(self, name: str, *numbers: int) -> Result:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(" ".join([name, *map(str, numbers)]) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        result: Result = json.loads(line) if line else {"error": f"the process ended: {self.process.wait()}"}
        tail = Path(self.log.name).read_text(errors="replace")[-4000:]
        assert "error" not in result, f"{result['error']}\n{tail}"
        return result

    def end(self) -> None:
        with self.process:
            try:
                with contextlib.suppress(BrokenPipeError):
                    assert self.process.stdin is not None
                    self.process.stdin.close()
                self.process.wait(20)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def players(
    real_stage: Stage, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Version], Player]]:
    """One process per version of vLLM for all scenarios: importing vLLM takes seconds."""
    started: dict[Version, Player] = {}
    with contextlib.ExitStack() as stack:

        def get(version: Version) -> Player:
            if version not in started:
                log = stack.enter_context((tmp_path_factory.mktemp("peers") / "log").open("wb"))
                started[version] = Player(real_stage.home, version, log)
                stack.callback(started[version].end)
            return started[version]

        yield get


@pytest.fixture
def scenario(players: Callable[[Version], Player], vllm_version: Version) -> Scenario:
    """`scenario(name)`: what that scenario of peer_tier_rounds.py came to."""
    return players(vllm_version).play


def got(pulled: Result) -> tuple[int, int]:
    """Chunks that the engine could load, and those of them with wrong bytes."""
    return pulled["hits"], pulled["wrong"]


def test_chunks_that_only_a_peer_has_arrive_byte_for_byte_and_nothing_stays_pinned(
    scenario: Scenario,
) -> None:
    result = scenario("one_source")
    assert got(result["first"]) == got(result["again"]) == (40, 0)
    assert got(result["unknown"]) == (0, 0)
    here, there = result["here"], result["there"]
    assert (here["jobs"], here["requests"], here["held"]) == (0, 0, [])
    assert (there["jobs"], there["requests"], there["counters"]["leases"]) == (0, 0, 0)
    counters = here["counters"]
    assert counters["pull_bytes['pointsman']"] == 40 * 65536
    assert counters["pulls['pointsman', 'ok']"] == 1, "what is here by now is not pulled again"
    assert counters["lookups['absent']"] == 8


def test_a_prefix_split_over_two_sources_arrives_whole_and_a_gap_ends_it(scenario: Scenario) -> None:
    result = scenario("two_sources")
    assert got(result["whole"]) == (20, 0)
    assert got(result["broken"]) == (4, 0)
    pulled = result["here"]["counters"]["pull_bytes['pointsman']"]
    assert pulled == 24 * 65536, "nothing behind a gap is moved"


def test_in_tree_peers_are_sources_and_consumers_where_they_are_allowed(scenario: Scenario) -> None:
    result = scenario("in_tree")
    assert got(result["planned"]) == (20, 0), "one job over an in-tree peer and one of ours"
    assert got(result["as_consumer"]) == (10, 0)
    assert got(result["as_source"]) == (10, 0)
    assert [got(one) for one in result["refusing"]] == [(0, 0), (0, 0)]
    there = result["there"]["counters"]
    assert there["lookups['not_allowed']"] == 1
    assert there["plans['stock_refused']"] == 1
    here = result["here"]
    assert result["settled"]
    assert (here["jobs"], here["requests"], here["held"]) == (0, 0, [])


def test_a_frozen_in_tree_source_costs_the_deadline_or_the_limit_of_stock_lookups(scenario: Scenario) -> None:
    result = scenario("in_tree_frozen")
    assert got(result["warm"]) == (4, 0)
    for name, at_least_s in (("planned", 0.4), ("named", 0.5)):
        assert got(result[name]) == (0, 0)
        assert at_least_s <= result[name]["seconds"] < at_least_s + 2
    assert result["settled"]
    assert result["end"] == [[0, 0, 96]]


def test_each_mismatch_is_refused_with_its_name_before_anything_moves(scenario: Scenario) -> None:
    found = scenario("mismatches")
    assert set(found) == {
        "weights_revision",
        "tenant",
        "layout",
        "block_length",
        "hash_seed",
        "tp_map",
        "dtype",
        "model",
    }
    for name, (hits, said, refused) in found.items():
        assert (hits, refused) == (0, 4), name
        assert said == f"refused:{name}"


def test_a_source_killed_at_any_moment_costs_time_and_nothing_else(scenario: Scenario) -> None:
    result = scenario("killed", 6)
    assert [moment for moment, *_ in result["rounds"]] == [0, 1, 2, 0, 1, 2]
    for moment, hits, wrong, seconds in result["rounds"]:
        assert wrong == 0
        assert hits is not None
        assert hits == 0 or moment > 0
        assert seconds < DEADLINE_S + 1.5
    assert got(result["again"]) == (20, 0), "a successor at the same address serves"
    assert result["settled"]
    assert result["end"] == [[0, 0, 96]]


def test_a_frozen_source_costs_the_deadline_and_serves_again_after_the_thaw(scenario: Scenario) -> None:
    result = scenario("frozen")
    assert got(result["warm"]) == (4, 0)
    assert got(result["stopped"]) == (0, 0)
    assert 0.4 <= result["stopped"]["seconds"] < 2.0
    assert got(result["thawed"]) == (16, 0)
    assert result["settled"]
    assert result["end"] == [[0, 0, 96], [0, 0, 96]]


def test_an_aborted_pull_spoils_no_chunk_of_the_request_that_wants_the_same_at_once(
    scenario: Scenario,
) -> None:
    result = scenario("aborted", 6)
    assert [wrong for _, wrong in result["rounds"]] == [0] * 6
    assert sum(hits for hits, _ in result["rounds"]) > 0
    assert result["settled"]
    assert result["end"] == [[0, 0, 48], [0, 0, 48]]


def test_a_reset_ends_pulls_and_waits_for_leases(scenario: Scenario) -> None:
    result = scenario("reset")
    after = result["after"]
    assert (after["jobs"], after["writing"]) == (0, 0)
    assert after["free"] + len(after["held"]) == 96
    assert got(result["emptied"]) == (0, 0)
    assert result["there"] == [[0, 0, 96]]


def test_held_chunks_are_handed_out_to_nobody_not_even_after_a_reset(scenario: Scenario) -> None:
    result = scenario("pool")
    assert result["free_while_held"] == result["after_reset"] == 12
    assert result["overlap"] == []
    assert result["distinct"] == [12, 16]
    assert result["too_many"]
    assert result["back"], "released chunks are the ones that are handed out next"


def test_under_vllms_own_spec_the_tier_refuses_to_start_and_names_ours(scenario: Scenario) -> None:
    refused = scenario("wrong_spec")["refused"]
    assert refused is not None
    assert "PointsmanOffloadingSpec" in refused
