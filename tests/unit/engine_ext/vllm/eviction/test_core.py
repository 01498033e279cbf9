# SPDX-License-Identifier: Apache-2.0
"""What the eviction policy promises, one promise a test."""

from __future__ import annotations

import pytest

from engine_ext.vllm.eviction.core import EvictionCore
from engine_ext.vllm.eviction.rebuild import RebuildCost
from engine_ext.vllm.eviction.settings import Settings
from engine_ext.vllm.plan import EvictHints

TOKENS = 512


def chain(name: str, length: int) -> list[tuple[str, int]]:
    return [(f"{name}{i}", TOKENS * (i + 1)) for i in range(length)]


def store(core: EvictionCore[str], name: str, length: int, now_s: float, **hints: object) -> list[str]:
    """A prompt that is read and held whole; its keys."""
    keys = chain(name, length)
    request = core.visit(keys, now_s, EvictHints(**hints))  # type: ignore[arg-type]
    for key, _ in keys:
        if core.get(key) is None:
            core.insert(key, key)
            core.mark_evictable(key)
    core.finish(request, now_s)
    return [key for key, _ in keys]


def evicted(core: EvictionCore[str], count: int, protected: tuple[str, ...] = ()) -> list[str]:
    found = core.evict(count, protected)
    assert found is not None
    return [str(key) for key, _ in found]


@pytest.fixture
def core() -> EvictionCore[str]:
    return EvictionCore(16)


def test_the_least_recently_used_prompt_goes_first_from_its_tail(core: EvictionCore[str]) -> None:
    store(core, "a", 3, 0.0)
    store(core, "b", 3, 1.0)
    store(core, "a", 3, 2.0)
    assert evicted(core, 4) == ["b2", "b1", "b0", "a2"]


def test_a_shared_beginning_outlives_every_tail_behind_it(core: EvictionCore[str]) -> None:
    head = chain("h", 2)
    for number in range(3):
        keys = [*head, (f"tail{number}", 3 * TOKENS)]
        core.visit(keys, float(number))
        for key, _ in keys:
            if core.get(key) is None:
                core.insert(key, key)
                core.mark_evictable(key)
    core.visit(head[:1], 9.0)
    assert evicted(core, 5) == ["tail0", "tail1", "tail2", "h1", "h0"]


def test_a_chunk_with_a_pinned_chunk_behind_it_goes_only_when_nothing_else_is_left(
    core: EvictionCore[str],
) -> None:
    store(core, "a", 2, 0.0)
    store(core, "b", 1, 1.0)
    core.mark_non_evictable("a1")
    assert evicted(core, 2) == ["b0", "a0"]
    assert core.evict(1) is None
    assert core.get("a1") == "a1"


def test_protected_chunks_stay_and_their_beginnings_too_where_there_is_a_choice(
    core: EvictionCore[str],
) -> None:
    store(core, "a", 2, 0.0)
    store(core, "b", 2, 1.0)
    assert evicted(core, 2, ("a1",)) == ["b1", "b0"]
    assert evicted(core, 1, ("a1",)) == ["a0"]
    assert core.evict(1, ("a1",)) is None
    assert evicted(core, 1) == ["a1"]


def test_an_eviction_that_cannot_be_satisfied_changes_nothing(core: EvictionCore[str]) -> None:
    store(core, "a", 4, 0.0)
    store(core, "b", 4, 1.0)
    core.mark_non_evictable("a2")
    before = (core.held, core.evictable, core.ghosts)
    assert core.evict(8) is None
    assert core.evict(5, ("a0", "a1", "b0")) is None
    assert (core.held, core.evictable, core.ghosts) == before
    assert evicted(core, 7) == ["a3", "b3", "b2", "b1", "b0", "a1", "a0"]


def test_the_attention_of_this_engine_is_fitted_to_the_routers_seconds() -> None:
    cost = RebuildCost(3.2e-5)
    for number in range(1, 60):
        tokens = 500 * number
        cost.observe(tokens, 1e-4 * tokens + 1e-9 * tokens**2 / 2)
    assert cost.attention_per_token == pytest.approx(1e-5, rel=1e-6)
    for tokens, seconds in ((0, 1.0), (100, 0.0)):
        cost.observe(tokens, seconds)
    assert cost.weight(1000) == pytest.approx(1.01)


def test_evicting_nothing_is_possible_always(core: EvictionCore[str]) -> None:
    assert core.evict(0) == []


def test_a_private_tail_goes_before_older_prompts(core: EvictionCore[str]) -> None:
    store(core, "old", 2, 0.0)
    store(core, "new", 4, 100.0, private_from_token=2 * TOKENS)
    assert evicted(core, 3) == ["new3", "new2", "old1"]


def test_a_pinned_beginning_stays_while_it_is_asked_for_and_ten_minutes_longer(
    core: EvictionCore[str],
) -> None:
    store(core, "pin", 2, 0.0, pinned_tokens=2 * TOKENS)
    store(core, "b", 2, 500.0)
    assert evicted(core, 1) == ["b1"]
    store(core, "b", 2, 1000.0)
    assert evicted(core, 2) == ["pin1", "pin0"]


def test_pinned_chunks_go_when_there_is_no_choice(core: EvictionCore[str]) -> None:
    store(core, "pin", 2, 0.0, pinned_tokens=2 * TOKENS)
    assert evicted(core, 2) == ["pin1", "pin0"]


def test_a_failed_store_leaves_no_chunk_behind(core: EvictionCore[str]) -> None:
    core.visit(chain("a", 1), 0.0)
    core.insert("a0", "first")
    core.remove("a0")
    assert (core.get("a0"), core.held, core.evictable) == (None, 0, 0)
    with pytest.raises(KeyError):
        core.remove("a0")
    core.insert("a0", "second", evictable=True)
    assert evicted(core, 1) == ["a0"]


def test_a_chunk_nobody_announced_is_held_and_given_up_like_others(core: EvictionCore[str]) -> None:
    core.insert("x", "x", evictable=True)
    assert core.get("x") == "x"
    assert evicted(core, 1) == ["x"]


def test_clear_forgets_chunks_pins_ghosts_and_what_was_learnt(core: EvictionCore[str]) -> None:
    store(core, "a", 4, 0.0)
    core.mark_non_evictable("a0")
    evicted(core, 1)
    core.clear()
    assert (core.held, core.evictable, core.ghosts, core.by_recency) == (0, 0, 0, True)
    assert core.get("a0") is None
    store(core, "a", 4, 1.0)
    assert evicted(core, 4) == ["a3", "a2", "a1", "a0"]


def test_ghosts_are_bounded_by_capacity_and_one_request() -> None:
    core: EvictionCore[str] = EvictionCore(8, Settings(ghosts=4.0))
    for number in range(500):
        core.visit(chain(f"p{number}-", 5), float(number))
        assert core.ghosts <= 4 * 8 + 5
    assert len(core._known) == core.ghosts
    assert not core._ages._queues[0] or sum(map(len, core._ages._queues)) < 200


def losing(peer_copies: int) -> EvictionCore[str]:
    """A tier that has seen recency lose: it goes by worth. Two prompts of one age and length lie in it."""
    core: EvictionCore[str] = EvictionCore(64)
    for turn in range(12):
        for number in range(20):
            keys = chain(f"loop{number}-", 8)
            core.visit(keys, turn * 20.0 + number)
            missing = [key for key, _ in keys if core.get(key) is None]
            if (needed := core.held + len(missing) - 64) > 0:
                assert core.evict(needed, [key for key, _ in keys]) is not None
            for key in missing:
                core.insert(key, key, evictable=True)
    assert not core.by_recency
    assert core.evict(core.evictable) is not None
    store(core, "copied", 4, 300.0, peer_copies=peer_copies)
    store(core, "alone", 4, 300.0)
    return core


def test_where_a_peer_holds_copies_they_are_given_up_first() -> None:
    assert evicted(losing(peer_copies=2), 4) == ["copied3", "copied2", "copied1", "copied0"]


def test_what_the_router_expects_to_be_reused_less_is_given_up_first() -> None:
    core = losing(peer_copies=0)
    for name, reuse in (("often", 50.0), ("rarely", 0.0), ("usual", 5.0)):
        store(core, name, 4, 300.0, reuse=reuse)
    assert evicted(core, 4) == ["rarely3", "rarely2", "rarely1", "rarely0"]


def test_of_two_prompts_worth_the_same_the_shorter_one_is_given_up_whole() -> None:
    core = losing(peer_copies=0)
    store(core, "long", 9, 300.0)
    assert {key[:4] for key in evicted(core, 8)} == {"copi", "alon"}


def test_a_loop_that_is_larger_than_the_tier_is_kept_in_part_where_recency_would_keep_nothing() -> None:
    core: EvictionCore[str] = EvictionCore(64)
    hits = 0
    for turn in range(60):
        for number in range(12):
            keys = chain(f"loop{number}-", 8)
            held = [key for key, _ in keys if core.get(key) is not None]
            hits += len(held) if turn >= 30 else 0
            core.visit(keys, turn * 12.0 + number)
            missing = [key for key, _ in keys if core.get(key) is None]
            if (needed := core.held + len(missing) - 64) > 0:
                assert core.evict(needed, [key for key, _ in keys]) is not None
            for key in missing:
                core.insert(key, key, evictable=True)
    assert hits > 0.3 * 30 * 12 * 8
