# SPDX-License-Identifier: Apache-2.0
"""Steps that are planned at once give what the same steps give one by one."""

from __future__ import annotations

from dataclasses import astuple
from random import Random

import pytest

from engine_ext.sim.errors import KvRequestIdInUseError
from engine_ext.sim.hashing import chain_hashes, root_hash
from engine_ext.sim.noise import Noise
from engine_ext.sim.output import SimCounters
from engine_ext.sim.request import Moved
from engine_ext.sim.tiers import StorageTier


def traffic(fleet, seed: int, *, every_token: bool):
    """A fleet after random traffic: few blocks, small budgets, pulls, aborts, storage, noise."""
    rng = Random(seed)
    sigma = rng.choice([0.0, 0.3])
    stored = rng.choice([None, 50])
    one = fleet(
        every_token=every_token,
        storage=lambda: StorageTier(stored) if seed % 2 else None,
        noise=lambda name: Noise(Random(f"{seed}{name}"), step_sigma=sigma, transfer_sigma=sigma),
        block_size_tokens=rng.choice([4, 16]),
        hbm_blocks=rng.choice([40, 80, 400]),
        ram_blocks=rng.choice([0, 30, 100]),
        max_model_len=400,
        max_num_batched_tokens=rng.choice([24, 64, 2048]),
        max_num_seqs=rng.choice([3, 8, 64]),
        offload_prompt_only=rng.random() < 0.5,
    )
    trunks = [[rng.randrange(50) for _ in range(rng.randrange(4, 120))] for _ in range(6)]
    rate = rng.choice([2, 20, 100])
    moved = {}
    at_s, aborts = 0.0, []
    for number in range(60):
        at_s += rng.expovariate(rate)
        for abort_s, engine, name in sorted(aborts):
            if abort_s <= at_s:
                aborts.remove((abort_s, engine, name))
                one.run(abort_s)
                one.engines[engine].abort(name, abort_s)
        one.run(at_s)
        engine, other = rng.sample("ab", 2)
        trunk = rng.choice(trunks)
        role = {"kv_request_id": f"k{rng.choice(['', number])}", "remote_host": other, "remote_port": 1}
        moved[number] = Moved()
        try:
            one.submit(
                engine,
                f"r{number}",
                [*trunk[: rng.randrange(1, len(trunk) + 1)], rng.randrange(50)],
                rng.randrange(1, 100),
                kv_transfer_params={"remote_kv_source": role} if rng.random() < 0.4 else None,
                stop_after_tokens=rng.choice([None, None, 7]),
                moved=moved[number],
            )
        except KvRequestIdInUseError:
            continue
        if rng.random() < 0.15:
            aborts.append((at_s + rng.random(), engine, f"r{number}"))
    one.run()
    return one, moved


def figures(moved: dict[int, Moved]) -> list[float]:
    return [figure for one in moved.values() for figure in astuple(one)]


def counters(one) -> list[SimCounters]:
    return [engine.metrics().counters for engine in one.engines.values()]


@pytest.mark.parametrize("seed", range(16))
def test_macro_steps_and_single_steps_give_the_same(fleet, seed: int) -> None:
    (fast, fast_moved), (slow, slow_moved) = (
        traffic(fleet, seed, every_token=every_token) for every_token in (False, True)
    )
    assert len(fast.log) == len(slow.log) > 60
    for name in fast.engines:
        mine, theirs = ([entry for entry in one.log if entry[1] == name] for one in (fast, slow))
        assert [entry[1:] for entry in mine] == [entry[1:] for entry in theirs]
        assert [entry[0] for entry in mine] == pytest.approx([entry[0] for entry in theirs], abs=1e-9)
    assert counters(fast) == counters(slow)
    assert figures(fast_moved) == pytest.approx(figures(slow_moved), rel=0, abs=1e-9)
    for engine in fast.engines.values():
        assert engine.metrics().kv_cache_usage == 0


def test_the_traffic_above_meets_every_case(fleet) -> None:
    seen = [one for seed in range(16) for one in counters(traffic(fleet, seed, every_token=False)[0])]
    assert sum(one.preemptions for one in seen) > 10
    assert sum(one.aborted_requests for one in seen) > 10
    assert sum(one.peer_lookups for one in seen) > 10
    assert all(sum(one.cached_by_tier[tier] for one in seen) > 0 for tier in seen[0].cached_by_tier)


def test_a_long_answer_is_a_handful_of_events(fleet) -> None:
    one = fleet("a", block_size_tokens=16, hbm_blocks=400)
    one.submit("a", "r", range(20), 800)
    one.submit("a", "s", range(20, 60), 800)
    events = 0
    while (due_s := one.engines["a"].next_event_s()) is not None:
        one._take("a", one.engines["a"].advance(due_s))
        events += 1
    assert one.engines["a"].metrics().counters.steps >= 800
    # Each block is taken in one step and full in another.
    assert events < 2 * 2 * 800 / 16 + 20


def test_the_text_is_that_of_single_steps(fleet) -> None:
    outputs = []
    for every_token in (False, True):
        one = fleet("a", every_token=every_token, block_size_tokens=4, hbm_blocks=400)
        one.submit("a", "r", range(10), 50)
        one.run()
        outputs.append([event for _, _, kind, event in one.log if kind == "events"])
    assert outputs[0] == outputs[1]
    assert sum(len(batch) for batch in outputs[0]) > 10


def test_gauges_between_silent_steps_are_those_of_single_steps(fleet) -> None:
    usages = []
    for every_token in (False, True):
        one = fleet("a", every_token=every_token, block_size_tokens=4, hbm_blocks=100)
        one.submit("a", "r", range(9), 60)
        seen = []
        for at_s in [0.1 + 0.003 * i for i in range(100)]:
            one.run(at_s)
            metrics = one.engines["a"].metrics(at_s)
            seen.append((metrics.kv_cache_usage, metrics.running, metrics.waiting))
        usages.append(seen)
    assert usages[0] == usages[1]
    assert len(set(usages[0])) >= 10


def test_what_peers_are_told_between_silent_steps_is_what_single_steps_would_tell(fleet) -> None:
    answers = []
    for every_token in (False, True):
        one = fleet("a", every_token=every_token, hbm_blocks=400, ram_blocks=30, offload_prompt_only=False)
        rng = Random(5)
        prompts = [range(start, start + 16) for start in range(0, 200, 20)]
        for number, prompt in enumerate(prompts):
            one.submit("a", f"p{number}", prompt)
            one.run()
        begun_s = one.now_s
        one.submit("a", "long", range(1000, 1009), 90)  # its blocks push the others out of RAM, one by one
        said = []
        for at_s in [begun_s + 0.0021 * i for i in range(350)]:
            one.run(at_s)
            hashes = chain_hashes(rng.choice(prompts), 4, root_hash())
            said.append(one.engines["a"].serve_lookup(hashes, at_s).hits)
        answers.append(said)
    assert answers[0] == answers[1]
    assert len({tuple(said) for said in answers[0]}) > 2
