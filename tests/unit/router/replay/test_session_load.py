# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine_ext.sim.profile import load_profile
from router.replay.session_load import SessionLoad, gpu_seconds, loaded_traffic
from router.replay.sessions import Session, session_agents
from router.replay.traces import TraceRequest

BLOCK = 64
PROFILE = load_profile("default")


def session(*turns: tuple[float, int], tokens_per_turn: int = 50) -> Session:
    """Turns at times, each with so many blocks; the next one begins with all of the one before."""
    requests: list[dict[str, Any]] = [
        {"t": at_s, "type": "s", "in": blocks * BLOCK + 1, "out": tokens_per_turn, "hash_runs": [[1, blocks]]}
        for at_s, blocks in turns
    ]
    return msgspec.convert({"block_size": BLOCK, "requests": requests}, Session)


def wanted(**changes: Any) -> SessionLoad:
    fields: dict[str, Any] = {"load": 0.5, "workers": 1, "window_s": 1000.0, "seed": 1}
    return SessionLoad(**fields | changes)


def only_agent(one: Session) -> list[TraceRequest]:
    (agent,) = session_agents(one, 1)
    return agent


def test_gpu_seconds_count_what_a_sessions_own_history_does_not_hold() -> None:
    first, second = only_agent(session((0.0, 100), (5.0, 130), tokens_per_turn=1))
    step_s, token_s = PROFILE.step_s(0, 0), PROFILE.step_s(1, 0) - PROFILE.step_s(0, 0)
    context_s = PROFILE.step_s(0, 100 * BLOCK + 1 + 130 * BLOCK + 1) - step_s
    expected_s = (
        PROFILE.prefill_s(100 * BLOCK + 1, 0)
        + PROFILE.prefill_s(30 * BLOCK + 1, 100 * BLOCK)
        + 2 * (step_s + token_s)
        + context_s
    )
    assert gpu_seconds([second, first], PROFILE, 8192) == pytest.approx(expected_s)


def test_a_prefill_pays_for_each_step_that_it_takes() -> None:
    (only,) = only_agent(session((0.0, 300), tokens_per_turn=1))
    more_s = gpu_seconds([only], PROFILE, 4096) - gpu_seconds([only], PROFILE, 8192)
    assert more_s == pytest.approx(2 * PROFILE.step_s(0, 0)), "five steps instead of three"


def test_the_window_asks_for_the_share_of_the_fleet_that_was_wanted() -> None:
    sessions = [session(*((30.0 * i, 100 + 20 * i) for i in range(turns))) for turns in (3, 8)]
    for load in (0.5, 1.0):
        traffic = loaded_traffic(sessions, PROFILE, wanted(load=load))
        warm = [one for one in traffic.requests if one.arrival_s < traffic.measured_from_s]
        asked_s = gpu_seconds(traffic.requests, PROFILE, 8192) - gpu_seconds(warm, PROFILE, 8192)
        assert asked_s / 1000.0 == pytest.approx(load, rel=0.1)


def test_sessions_are_found_in_their_midst_and_their_last_prompt_comes_before_the_window() -> None:
    traffic = loaded_traffic([session(*((30.0 * i, 100 + i) for i in range(20)))], PROFILE, wanted())
    warm = [one for one in traffic.requests if one.arrival_s < traffic.measured_from_s]
    measured = traffic.requests[len(warm) :]
    assert warm
    assert all(one.output_tokens == 1 for one in warm)
    held = {one.block_ids[0]: one.full_blocks for one in warm}
    first: dict[int, int] = {}
    for one in measured:
        first.setdefault(one.block_ids[0], one.full_blocks)
    under_way = [name for name in first if name in held]
    assert len(under_way) == len(warm)
    assert all(first[name] == held[name] + 1 for name in under_way), "it goes on with the next turn"
    assert all(first[name] == 100 for name in first if name not in held)


def test_no_pause_is_longer_than_the_longest_that_is_kept() -> None:
    slow = session((0.0, 100), (5.0, 101), (900.0, 102))
    (agent,) = session_agents(slow, 1, max_gap_s=60.0)
    assert [one.arrival_s for one in agent] == [0.0, 5.0, 65.0]
    assert [one.arrival_s for one in only_agent(slow)] == [0.0, 5.0, 900.0]


def test_requests_that_are_too_long_are_left_out_counted_and_need_no_capacity() -> None:
    short, long = session((0.0, 100)), session((0.0, 100), (5.0, 200))
    bound = wanted(max_input_tokens=150 * BLOCK)
    traffic = loaded_traffic([short, long], PROFILE, bound)
    assert max(one.input_tokens for one in traffic.requests) == 100 * BLOCK + 1
    assert traffic.too_long > 0
    assert traffic.sessions_per_s == loaded_traffic([short], PROFILE, bound).sessions_per_s
    with pytest.raises(ValueError, match="short enough"):
        loaded_traffic([session((0.0, 200))], PROFILE, bound)


def test_equal_seeds_give_equal_traffic_and_others_do_not() -> None:
    sessions = [session((0.0, 100), (5.0, 130))]
    once, again = (loaded_traffic(sessions, PROFILE, wanted(seed=3)) for _ in range(2))
    assert once == again
    assert once != loaded_traffic(sessions, PROFILE, wanted(seed=4))
