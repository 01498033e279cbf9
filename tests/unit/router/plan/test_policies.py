# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from router.costs.model import CostModel
from router.costs.profile import load_profile
from router.plan.candidate import Candidate, Plan, Question, Residence, Source
from router.plan.load import LoadBoard
from router.plan.peers import CacheAware, FixedCredits, Gauges, LlmD, LlmDPolicyName, LongestPrefix
from router.plan.planner import Planner
from router.plan.policies import Policy, make_policy
from router.replay.policies import REPLAY_POLICIES, make_replay_policy

B = 16
BLOCKS = 400
TOKENS = BLOCKS * B + 1
CAPACITY = 100_000


def planner() -> Planner:
    return Planner(CostModel(load_profile("default")), 0.1, 5.0)


def candidate(worker: str, hbm: int = 0, ram: int = 0, storage: int = 0, **fields: Any) -> Candidate:
    """Holds the first blocks in HBM, those after them in RAM, those after these on storage."""
    residence = Residence(
        hbm=((0, hbm),) if hbm else (),
        ram=((hbm, hbm + ram),) if ram else (),
        storage=((hbm + ram, hbm + ram + storage),) if storage else (),
    )
    values: dict[str, Any] = {
        "dp_rank": 0,
        "block_size_tokens": B,
        "chunk_blocks": 1,
        "residence": [residence],
        "queue_s": 0.0,
        "decodes": 0,
        "can_pull": True,
    }
    return Candidate(worker=worker, **values | fields)


def source(worker: str, ram: int) -> Source:
    return Source(worker, 0, f"host-{worker}", 5710, Residence(ram=((0, ram),)), 0)


def choose(
    policy: Policy, candidates: list[Candidate], sources: list[Source] | None = None, seed: int = 0
) -> Plan:
    return policy.rank(Question([TOKENS], candidates, sources or []), Random(seed)).chosen


@dataclass
class View:
    """Of a fleet, told in advance."""

    polled: Mapping[str, Gauges] = field(default_factory=dict)
    in_use: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)

    def gauges(self, worker: str) -> Gauges:
        return self.polled.get(worker, Gauges(0, 0.0))

    def tokens_in_use(self, worker: str) -> int:
        return self.in_use.get(worker, 0)

    def tokens_sent_lately(self, worker: str) -> int:
        return self.sent.get(worker, 0)


def worker_of(policy: Policy, *candidates: Candidate) -> str:
    return choose(policy, list(candidates)).worker


# All of them


@pytest.mark.parametrize("name", REPLAY_POLICIES)
def test_every_policy_ranks_each_candidate_once_and_bears_its_name(name: Any) -> None:
    policy = make_replay_policy(name, planner(), CAPACITY)
    assert policy.name == name
    ranking = policy.rank(
        Question([TOKENS], [candidate(w) for w in "abc"], [source("a", 9)]), Random(1)
    ).ranking
    assert sorted(plan.worker for plan in ranking) == ["a", "b", "c"]


@pytest.mark.parametrize("name", [name for name in REPLAY_POLICIES if name != "round_robin"])
def test_equals_are_ordered_by_chance(name: Any) -> None:
    policy = make_replay_policy(name, planner(), CAPACITY)
    question = Question([TOKENS], [candidate(w) for w in "abcd"])
    chosen = Counter(policy.rank(question, Random(seed)).chosen.worker for seed in range(200))
    assert set(chosen) == set("abcd")
    assert max(chosen.values()) < 100


@pytest.mark.parametrize(
    "name", [name for name in REPLAY_POLICIES if name != "kv_aware" and "pull" not in name]
)
def test_only_ours_and_those_named_so_ever_pull(name: Any) -> None:
    policy = make_replay_policy(name, planner(), CAPACITY)
    ranking = policy.rank(Question([TOKENS], [candidate("a")], [source("b", BLOCKS)]), Random(0)).ranking
    assert [plan.source for plan in ranking] == [None]


def test_round_robin_takes_each_in_turn_and_least_load_the_fewest_in_flight() -> None:
    turns = make_policy("round_robin", planner())
    assert [worker_of(turns, *map(candidate, "cab")) for _ in range(4)] == ["a", "b", "c", "a"]
    loaded = [candidate("a", hbm=BLOCKS, in_flight=2), candidate("b", in_flight=1)]
    assert worker_of(make_policy("least_load", planner()), *loaded) == "b"


# Longest prefix


def test_longest_prefix_ignores_load_and_counts_every_tier() -> None:
    policy = LongestPrefix(planner())
    busy = candidate("a", hbm=10, ram=20, storage=30, in_flight=500, queue_s=90.0)
    assert worker_of(policy, candidate("b", hbm=59), busy) == "a"
    assert worker_of(policy, candidate("b", hbm=61), busy) == "b"


# Cache-aware with thresholds


def test_cache_aware_follows_a_match_above_its_share_of_the_prompt() -> None:
    policy = CacheAware(planner())
    at_share, above = int(BLOCKS * 0.3), int(BLOCKS * 0.3) + 1
    assert worker_of(policy, candidate("a", hbm=above, in_flight=64), candidate("b")) == "a"
    assert worker_of(policy, candidate("a", hbm=at_share, in_flight=64), candidate("b")) == "b"


def test_cache_aware_leaves_the_match_when_loads_are_imbalanced() -> None:
    policy = CacheAware(planner())
    assert worker_of(policy, candidate("a", hbm=BLOCKS, in_flight=65), candidate("b")) == "b"
    # 75 more, but not half as much again: balanced.
    busy = [candidate("a", hbm=BLOCKS, in_flight=225), candidate("b", in_flight=150)]
    assert worker_of(policy, *busy) == "a"
    busy[0] = candidate("a", hbm=BLOCKS, in_flight=226)
    assert worker_of(policy, *busy) == "b"


def test_cache_aware_breaks_equal_matches_by_load() -> None:
    equals = [candidate("a", hbm=BLOCKS, in_flight=3), candidate("b", hbm=BLOCKS, in_flight=1)]
    assert worker_of(CacheAware(planner()), *equals) == "b"


# Fixed credits


def test_fixed_credits_cost_is_the_published_sum() -> None:
    one = candidate("a", hbm=100, ram=80, storage=40, prefill_tokens=32 * B, active_tokens=200 * B)
    prompt = TOKENS / B
    overlap = 100 + 0.75 * 80 + 0.25 * 40
    asked = Question([TOKENS], [one])
    prefill = 32 + prompt - overlap
    assert FixedCredits(planner()).cost(asked, one) == pytest.approx(prefill + 200 + prompt)
    shared = FixedCredits(planner(), View(in_use={"a": 250 * B}))
    assert shared.cost(asked, one) == pytest.approx(prefill + 250)


def test_fixed_credits_value_a_block_by_its_tier_and_never_by_its_time() -> None:
    policy = FixedCredits(planner())
    assert worker_of(policy, candidate("a", ram=100), candidate("b", hbm=74)) == "a"
    assert worker_of(policy, candidate("a", ram=100), candidate("b", hbm=76)) == "b"
    assert worker_of(policy, candidate("a", storage=100), candidate("b", ram=34)) == "b"


def test_fixed_credits_weigh_a_cached_block_against_one_of_load() -> None:
    policy = FixedCredits(planner())
    assert worker_of(policy, candidate("a", hbm=100, active_tokens=99 * B), candidate("b")) == "a"
    assert worker_of(policy, candidate("a", hbm=100, active_tokens=101 * B), candidate("b")) == "b"
    assert worker_of(policy, candidate("a", hbm=100, prefill_tokens=101 * B), candidate("b")) == "b"


# Fixed pull


def fixed_pull() -> LlmD:
    return LlmD(planner(), "fixed_pull", CAPACITY)


def test_fixed_pull_places_by_three_parts_prefix_one_queue_one_free_space() -> None:
    # The holder loses the whole queue score, a third of what a full prefix is worth.
    busy = {"in_flight": 9, "decodes": 1}
    share = BLOCKS // 3
    assert worker_of(fixed_pull(), candidate("a", hbm=share + 2, **busy), candidate("b")) == "a"
    assert worker_of(fixed_pull(), candidate("a", hbm=share - 2, **busy), candidate("b")) == "b"
    full = {"active_tokens": CAPACITY}
    assert worker_of(fixed_pull(), candidate("a", hbm=share - 2, **full), candidate("b")) == "b"


def test_fixed_pull_counts_lower_tiers_at_four_fifths() -> None:
    assert worker_of(fixed_pull(), candidate("a", ram=100), candidate("b", hbm=79)) == "a"
    assert worker_of(fixed_pull(), candidate("a", ram=100), candidate("b", hbm=81)) == "b"


def test_fixed_pull_pulls_from_a_lead_of_2048_tokens_whatever_it_costs() -> None:
    lead = 2048 // B
    chosen = choose(fixed_pull(), [candidate("a", hbm=10)], [source("b", 10 + lead)])
    assert chosen.source is not None
    assert chosen.source.worker == "b"
    assert chosen.path_blocks["peer"] == lead
    assert choose(fixed_pull(), [candidate("a", hbm=10)], [source("b", 9 + lead)]).source is None


def test_fixed_pull_never_lets_a_source_change_the_placement() -> None:
    idle, busy = candidate("a"), candidate("b", in_flight=5, hbm=5)
    with_source = choose(fixed_pull(), [idle, busy], [source("b", BLOCKS)])
    assert with_source.worker == choose(fixed_pull(), [idle, busy]).worker == "a"
    assert with_source.source is not None


def test_fixed_pull_never_names_the_chosen_worker_or_an_engine_that_cannot_pull() -> None:
    assert choose(fixed_pull(), [candidate("a")], [source("a", BLOCKS)]).source is None
    assert choose(fixed_pull(), [candidate("a", can_pull=False)], [source("b", BLOCKS)]).source is None


def test_fixed_pull_draws_among_nearly_equal_sources_by_their_queues() -> None:
    workers = [candidate("a", hbm=50), candidate("b", in_flight=9), candidate("c")]
    sources = [source("b", BLOCKS), source("c", BLOCKS - 1), source("d", BLOCKS - 2)]
    drawn = Counter[str]()
    for seed in range(400):
        plan = choose(fixed_pull(), workers, sources, seed)
        assert plan.source is not None
        drawn[plan.source.worker] += 1
    assert set(drawn) == {"b", "c"}
    assert drawn["b"] < 80, "weight 1/10 against 1"


# The placements of llm-d's guide


def llm_d(name: LlmDPolicyName, **gauges: Gauges) -> LlmD:
    return LlmD(planner(), name, CAPACITY, View(polled=gauges))


def test_affinity_follows_the_prefix_until_the_load_outweighs_it() -> None:
    holder, other = candidate("a", hbm=BLOCKS), candidate("b")
    # A whole prefix is worth 3; the longest queue costs 2, a full cache 2.
    assert worker_of(llm_d("affinity", a=Gauges(9, 0.4)), holder, other) == "a"
    assert worker_of(llm_d("affinity", a=Gauges(9, 0.6)), holder, other) == "b"
    assert worker_of(llm_d("affinity", a=Gauges(0, 0.9)), holder, other) == "a"


def test_affinity_spreads_prompts_that_nobody_holds_over_who_had_none_for_longest() -> None:
    policy = llm_d("affinity")
    cold = [candidate(name) for name in "abc"]
    turns = [worker_of(policy, *cold) for _ in range(6)]
    assert turns[:3] == turns[3:]
    assert set(turns) == {"a", "b", "c"}
    warm = [candidate("a", hbm=1), candidate("b"), candidate("c")]
    assert worker_of(policy, *warm) == "a", "a block held anywhere, and the turns do not count"
    assert worker_of(policy, *cold) == turns[0]


def test_affinity_counts_what_was_just_sent_and_load_does_not() -> None:
    view = View(sent={"b": BLOCKS * B // 2})
    workers = [candidate("a", hbm=BLOCKS // 4), candidate("b")]
    assert worker_of(LlmD(planner(), "affinity", CAPACITY, view), *workers) == "b"
    assert worker_of(LlmD(planner(), "fixed_pull", CAPACITY, view), *workers) == "a"


def test_load_draws_by_score_and_never_looks_at_the_prefix() -> None:
    policy = llm_d("load", a=Gauges(10, 0.5), b=Gauges(0, 0.0))
    workers = [candidate("a", hbm=BLOCKS), candidate("b")]
    drawn = Counter(choose(policy, workers, seed=seed).worker for seed in range(600))
    # Scores 3 * 0 + 2 * 0.5 and 3 * 1 + 2 * 1.
    assert 60 < drawn["a"] < 140
    assert policy.rank(Question([TOKENS], workers), Random(0)).ranking[1].worker in "ab"


@pytest.mark.parametrize(
    ("name", "pulls"), [("load", False), ("load_pull", True), ("affinity", False), ("affinity_pull", True)]
)
def test_only_the_pulling_placements_pull_and_the_pull_changes_no_placement(
    name: LlmDPolicyName, pulls: bool
) -> None:
    busy_holder = llm_d(name, b=Gauges(50, 1.0))
    plan = choose(busy_holder, [candidate("a"), candidate("b")], [source("b", BLOCKS)])
    assert plan.worker == "a"
    assert (plan.source is not None) == pulls


# The token counts that such policies look at


def test_board_counts_tokens_to_compute_until_the_first_token_and_tokens_in_use_until_the_end() -> None:
    board = LoadBoard()
    first = board.promise("a", 0, 1.0, 1.0, 0.0, prompt_tokens=100, missing_tokens=40)
    second = board.promise("a", 0, 1.0, 1.0, 0.0, prompt_tokens=7, missing_tokens=7)
    assert (board.prefill_tokens("a", 0), board.active_tokens("a", 0)) == (47, 107)
    board.first_token(first, 1.0)
    assert (board.prefill_tokens("a", 0), board.active_tokens("a", 0)) == (7, 107)
    board.release(second, 2.0)
    board.release(second, 2.0)
    assert (board.prefill_tokens("a", 0), board.active_tokens("a", 0)) == (0, 100)
    board.release(first, 3.0)
    assert (board.prefill_tokens("a", 0), board.active_tokens("a", 0)) == (0, 0)
    assert (board.prefill_tokens("b", 0), board.active_tokens("b", 0)) == (0, 0)
