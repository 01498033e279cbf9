# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from array import array
from random import Random
from typing import Any

import kv_batches as kv
import msgspec
import pytest

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import Namespace, WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index
from router.costs.model import CERTAIN, CostChanges, CostModel, Doubts, Link
from router.costs.profile import load_profile
from router.decisions.lost import reach_tokens
from router.fleet.snapshot import Snapshot, excluding
from router.fleet.worker import Health, WorkerSpec, WorkerStatus
from router.plan.decider import Decider, Decision, Prompts
from router.plan.load import LoadBoard
from router.plan.native import NativePlanner
from router.plan.native_board import NativeLoadBoard
from router.plan.native_fleet import KEPT, NativeFleet
from router.plan.native_question import FleetAsked
from router.plan.planner import Planner
from router.plan.policies import make_policy

BLOCKS = 64
IDS = array("I", range(BLOCKS * 16))
# Computing is slow, so that pulling a short prompt pays.
PROFILE = msgspec.structs.replace(load_profile("default"), prefill_s_per_token=0.001)
PROMPTS = Prompts([IDS], Namespace("m"))


class SettableCosts:
    """Alike but for what a test sets, and it tells."""

    def __init__(self) -> None:
        self.models: dict[str, CostModel] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.usual = CostModel(PROFILE)
        self.changes = CostChanges()

    def model_for(self, worker: str) -> CostModel:
        return self.models.get(worker, self.usual)

    def link(self, source: str, destination: str) -> Link:
        return self.links.get((source, destination), self.usual.link("", ""))

    def doubts(self, worker: str, source: str | None, peer_s: float) -> Doubts:
        return CERTAIN

    def watch(self) -> CostChanges:
        return self.changes

    def set_model(self, worker: str, **constants: float) -> None:
        self.models[worker] = CostModel(msgspec.structs.replace(PROFILE, **constants))
        self.changes.workers.add(worker)

    def set_link(self, source: str, destination: str, link: Link) -> None:
        self.links[source, destination] = link
        self.changes.links.add((source, destination))


class Fleets:
    """Workers in two deciders: over the native table and over plain questions."""

    def __init__(self) -> None:
        self.costs = SettableCosts()
        self.holders = HolderTable(open_index(HashKey(bytes(16)), IndexLimits()), lambda: 1.0)
        self.board, self.plain_board = NativeLoadBoard(), LoadBoard()
        self.statuses: dict[str, WorkerStatus] = {}
        self.random = Random(0)
        planner = NativePlanner(self.costs, 0.1, 5.0)
        self.table = NativeFleet(self.holders, self.board, self.costs, planner.settings, use_peers=True)
        self.native = Decider(
            self.holders, self.board, make_policy("kv_aware", planner), use_peers=True, fleet=self.table
        )
        plain = make_policy("kv_aware", Planner(self.costs, 0.1, 5.0))
        self.plain = Decider(self.holders, self.plain_board, plain, use_peers=True)

    def join(self, name: str, blocks: int = 0, **facts: Any) -> None:
        """A worker that holds the first ``blocks`` of the prompt in HBM and RAM."""
        extension = facts.pop("extension", None)
        spec = WorkerSpec(name, f"http://{name}", p2p=f"{name}:5710", extension=extension)
        values: dict[str, Any] = {
            "health": Health.HEALTHY,
            "answering": True,
            "block_size_tokens": 16,
        } | facts
        self.statuses[name] = WorkerStatus(spec, **values)
        self.holders.register(WorkerId(name), "m", 1)
        held = list(range(1, blocks + 1))
        events = [kv.stored(held, IDS[: blocks * 16], block_size=16), kv.placeholder(held)]
        self.holders.apply(WorkerRank(WorkerId(name)), 0, kv.batch(*events))

    def decide(self, *without: str, now_s: float = 1.0) -> Decision:
        """By the native table; the plain decider agrees."""
        snapshot = Snapshot(self.statuses.values())
        candidates = excluding(snapshot, without)
        native = self.native.decide(PROMPTS, candidates, snapshot, now_s, self.random)
        plain = self.plain.decide(PROMPTS, candidates, snapshot, now_s, self.random)
        best = plain.planned.ranking[:KEPT]
        assert [one.score_s for one in native.planned.ranking] == [one.score_s for one in best]
        assert native.planned.count == plain.planned.count
        return native


def source_of(decision: Decision) -> str | None:
    source = decision.planned.chosen.source
    return source.worker if source is not None else None


def test_link_that_is_not_like_the_rest_is_known_again_when_its_worker_comes_back() -> None:
    fleets = Fleets()
    fleets.join("far", BLOCKS)
    fleets.join("near", BLOCKS)
    fleets.join("empty")
    fleets.costs.set_link("far", "empty", Link(10.0, 10.0, 1.0))
    assert source_of(fleets.decide("far", "near")) == "near"
    away = fleets.statuses.pop("empty")
    fleets.decide()
    fleets.statuses["empty"] = away
    assert source_of(fleets.decide("far", "near")) == "near"
    fleets.costs.set_link("near", "empty", Link(20.0, 20.0, 1.0))
    fleets.costs.set_link("far", "empty", fleets.costs.usual.link("", ""))
    assert source_of(fleets.decide("far", "near")) == "far"


def test_worker_that_comes_after_another_one_left_inherits_nothing_of_it() -> None:
    fleets = Fleets()
    fleets.join("slow", BLOCKS)
    fleets.join("other", BLOCKS)
    fleets.costs.set_model("slow", prefill_start_s=9.0)
    fleets.costs.set_link("slow", "other", Link(0.0, 0.0, 1e15))
    fleets.costs.set_link("other", "slow", Link(0.0, 0.0, 1e15))
    assert fleets.decide().planned.chosen.worker == "other"
    del fleets.statuses["slow"]
    for board in (fleets.board, fleets.plain_board):
        board.forget("slow")
    fleets.decide()
    fleets.join("fresh")
    ticket = fleets.board.promise("other", 0, 50.0, 50.0, 1.0)
    fleets.plain_board.promise("other", 0, 50.0, 50.0, 1.0)
    decision = fleets.decide()
    assert (decision.planned.chosen.worker, source_of(decision)) == ("fresh", "other")
    fleets.board.release(ticket, 1.0)
    assert fleets.board._numbers == {"fresh": 0, "other": 1}


@pytest.mark.parametrize(
    ("facts", "serves"),
    [
        ({}, True),
        ({"health": Health.DRAINING}, True),
        ({"health": Health.BACKOFF}, False),
        ({"health": Health.UNHEALTHY}, False),
        ({"answering": False}, False),
        ({"cache_dtype": "fp8"}, False),
        ({"block_size_tokens": 8}, False),
        ({"block_size_tokens": None}, False),
    ],
)
def test_only_a_peer_that_answers_and_fits_is_a_source(facts: dict[str, Any], serves: bool) -> None:
    fleets = Fleets()
    fleets.join("peer", BLOCKS, **facts)
    fleets.join("empty")
    assert source_of(fleets.decide("peer")) == ("peer" if serves else None)


def test_workers_with_our_extension_take_a_prompt_from_several_at_once() -> None:
    fleets = Fleets()
    for name in ("a", "b", "w"):
        fleets.join(name, BLOCKS if name != "w" else 0, extension=f"{name}:5720")
    for board in (fleets.board, fleets.plain_board):
        for name in ("a", "b"):
            board.promise(name, 0, 60.0, 60.0, 1.0)
            for other in range(3):
                board.promise(f"other{other}", 0, 1.0, 1.0, 1.0, [name])
    chosen = fleets.decide().planned.chosen
    assert (chosen.worker, chosen.extension) == ("w", True)
    assert [(one.source.extension_address, one.start_block, one.end_block) for one in chosen.pulls] == [
        ("a:5720", 0, 32),
        ("b:5720", 32, 64),
    ]
    fleets.statuses["b"].spec = WorkerSpec("b", "http://b", p2p="b:5710")
    stock = fleets.decide().planned.chosen
    assert [one.source.worker for one in stock.pulls] == ["a"]


def test_of_a_large_fleet_the_best_are_ranked_and_all_are_counted() -> None:
    fleets = Fleets()
    for number in range(40):
        fleets.join(f"w{number}", blocks=(number * 7) % 30)
        fleets.board.promise(f"w{number}", 0, 0.01 * number, 1.0, 1.0)
        fleets.plain_board.promise(f"w{number}", 0, 0.01 * number, 1.0, 1.0)
    decision = fleets.decide()
    assert (len(decision.planned.ranking), decision.planned.count) == (KEPT, 40)


def test_question_of_a_large_fleet_keeps_who_could_have_most_of_the_prompt_cached() -> None:
    fleets = Fleets()
    for number in range(30):
        fleets.join(f"w{number}", blocks=number % 3)
    fleets.join("holder", BLOCKS)
    for board in (fleets.board, fleets.plain_board):
        board.promise("holder", 0, 60.0, 60.0, 1.0)
    fleets.statuses["holder"].cache_dtype = "fp8"  # nobody can pull from it
    decision = fleets.decide()
    assert "holder" not in {plan.worker for plan in decision.planned.ranking}
    assert decision.question is not None
    assert reach_tokens(decision.question) == BLOCKS * 16


def test_equal_lists_are_prepared_once_and_others_anew() -> None:
    fleets = Fleets()
    fleets.join("a", 3)
    fleets.join("b")
    snapshot = Snapshot(fleets.statuses.values())
    chosen = fleets.table._choose(snapshot, snapshot, "m")
    assert fleets.table._choose(snapshot, snapshot, "m") is chosen
    assert fleets.table._choose(snapshot, snapshot, "n") is not chosen
    assert fleets.table._choose(Snapshot(snapshot), snapshot, "m") is not chosen
    plain = [*snapshot]
    assert fleets.table._choose(plain, plain, "m") is not fleets.table._choose(plain, plain, "m")


def test_what_a_decision_was_made_of_can_be_read_when_the_fleet_has_changed() -> None:
    fleets = Fleets()
    fleets.join("gone", BLOCKS)
    fleets.join("stays")
    decision = fleets.decide("gone")
    del fleets.statuses["gone"]
    fleets.board.forget("gone")
    fleets.plain_board.forget("gone")
    fleets.join("new", 5)
    fleets.decide()
    assert decision.question is not None
    assert [one.worker for one in decision.question.candidates] == ["stays"]
    assert [(one.worker, one.host) for one in decision.question.sources] == [("gone", "gone")]


def test_candidates_are_unknown_until_they_are_ranked() -> None:
    fleets = Fleets()
    fleets.join("a")
    snapshot = Snapshot(fleets.statuses.values())
    survey = fleets.table.ask(FleetAsked(PROMPTS.token_ids, "m"), snapshot, snapshot, 1.0)
    with pytest.raises(RuntimeError, match="ranked"):
        len(survey.candidates)


def test_nobody_to_choose_from_is_refused() -> None:
    fleets = Fleets()
    with pytest.raises(ValueError, match="candidates"):
        fleets.native.decide(PROMPTS, Snapshot(), Snapshot(), 1.0, fleets.random)


def test_index_in_plain_python_is_refused() -> None:
    holders = HolderTable(open_index(HashKey(bytes(16)), IndexLimits(), "reference"), lambda: 1.0)
    costs = CostModel(PROFILE)
    settings = NativePlanner(costs, 0.1, 5.0).settings
    with pytest.raises(TypeError, match="native index"):
        NativeFleet(holders, NativeLoadBoard(), costs, settings, use_peers=True)


def test_tokens_that_are_not_32_bits_are_refused() -> None:
    fleets = Fleets()
    fleets.join("a")
    snapshot = Snapshot(fleets.statuses.values())
    wide = Prompts([array("Q", [1, 2, 3])], Namespace("m"))
    with pytest.raises(ValueError, match="32-bit"):
        fleets.native.decide(wide, snapshot, snapshot, 1.0, fleets.random)


def test_decisions_go_on_while_another_thread_applies_events() -> None:
    fleets = Fleets()
    for name in ("a", "b", "c"):
        fleets.join(name, BLOCKS)
    held = list(range(1, BLOCKS + 1))
    stop = threading.Event()

    def publish() -> None:
        rank, seq = WorkerRank(WorkerId("a")), 1
        while not stop.is_set():
            for events in (
                [kv.removed(held, "CPU"), kv.removed(held[5:])],
                [kv.stored(held, IDS, block_size=16), kv.placeholder(held)],
            ):
                fleets.holders.apply(rank, seq, kv.batch(*events))
                seq += 1
            if seq % 50 == 1:
                fleets.holders.new_incarnation(WorkerId("a"), "test")

    snapshot = Snapshot(fleets.statuses.values())
    thread = threading.Thread(target=publish)
    thread.start()
    try:
        for _ in range(300):
            decision = fleets.native.decide(PROMPTS, snapshot, snapshot, 1.0, fleets.random)
            for plan in decision.planned.ranking:
                assert sum(plan.path_blocks.values()) == BLOCKS
    finally:
        stop.set()
        thread.join()
