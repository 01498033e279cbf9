# SPDX-License-Identifier: Apache-2.0
"""Faults of workers and their event streams: the service answers, the index ends up right, the fault shows."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from eventually import eventually
from index_truth import truth
from service import (
    BLOCK,
    CALM,
    MODEL,
    Reply,
    Service,
    entry,
    order_faults,
    service,
    sim_state,
    sim_workers,
    worker_processes,
)

from indexer.hashing import load_or_make_key

REPLAY = ("--replay", "tcp://127.0.0.1:0")


def prompts(seed: int, count: int, blocks: int = 3) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(97, 123) for _ in range(blocks * BLOCK)] for _ in range(count)]


async def stream_of(one: Service, worker: str) -> Any:
    return (await one.workers())[worker]["streams"][0]


async def test_a_worker_killed_under_load_costs_no_request(tmp_path: Path) -> None:
    async with (
        worker_processes(3, *REPLAY) as workers,
        service([w.entry() for w in workers], tmp_path) as one,
    ):
        victim = workers[0]
        asked = prompts(1, 90)
        waiting = asyncio.Semaphore(8)
        served: Counter[str] = Counter()

        async def ask(prompt: list[int]) -> Reply:
            async with waiting:
                reply = await one.complete(prompt, max_tokens=16)
            served[reply.headers.get("x-pointsman-worker", "none")] += 1
            return reply

        async def kill_once_it_works() -> None:
            async def has_work() -> bool:
                return served[victim.id] > 0

            await eventually(has_work, "no request served by the worker to be killed")
            victim.kill()

        killing = asyncio.create_task(kill_once_it_works())
        replies = await asyncio.gather(*(ask(prompt) for prompt in asked))
        await killing
        assert [reply.status for reply in replies] == [200] * len(asked)

        async def gone() -> bool:
            return bool((await one.workers())[victim.id]["health"] == "unhealthy")

        await eventually(gone, "a killed worker that is not unhealthy")
        assert await one.metric("pointsman_worker_health", worker=victim.id, state="unhealthy") == 1
        assert victim.id in (await one.get("/ready"))["degraded"]["unhealthy_workers"]
        stream = await stream_of(one, victim.id)
        assert stream["connected"] is False
        for prompt in asked[:20]:
            reply = await one.complete(prompt)
            assert reply.status == 200
            assert reply.worker != victim.id
        for worker in workers[1:]:
            assert await one.index_equals_truth(worker.url) > 0
        await one.idle()


async def test_requests_that_a_dead_worker_took_fail_over_before_their_first_byte(tmp_path: Path) -> None:
    """The best holder is dead and no poll has noticed: the answer comes from another worker."""
    settings = {"fleet.poll_interval_s": 3600.0}
    async with (
        worker_processes(2, *REPLAY) as workers,
        service([w.entry() for w in workers], tmp_path, settings) as one,
    ):
        prompt = prompts(2, 1, blocks=20)[0]
        holder = (await one.complete(prompt)).worker
        dead, alive = sorted(workers, key=lambda worker: worker.id != holder)
        await one.index_equals_truth(dead.url)
        dead.kill()
        for stream in (False, True):
            reply = await one.complete(prompt, stream=stream)
            assert (reply.status, reply.worker) == (200, alive.id)
            attempts = (await one.decision(reply))["earlier_attempts"]
            if attempts:
                assert [(a["worker"], a["observed"]["outcome"]) for a in attempts] == [
                    (dead.id, "worker_error")
                ]
        assert await one.metric("pointsman_attempts_total", worker=dead.id, outcome="worker_error") >= 1


@pytest.mark.parametrize("replay", [True, False])
async def test_a_worker_restarted_at_its_address_is_credited_with_nothing_old(
    tmp_path: Path, replay: bool
) -> None:
    async with (
        worker_processes(2, *(REPLAY if replay else ())) as workers,
        service([w.entry() for w in workers], tmp_path) as one,
    ):
        again, other = workers[0], workers[1].id
        asked = prompts(3, 6, blocks=10)
        await one.drain(other)
        for prompt in asked:
            assert (await one.complete(prompt)).worker == again.id
        await one.drain(other, draining=False)
        assert await one.index_equals_truth(again.url) == 60
        assert (await one.workers())[again.id]["incarnation"] == 1

        again.kill()
        assert (await one.complete(asked[0])).worker == other
        await again.start_again()

        async def renewed() -> bool:
            row = (await one.workers())[again.id]
            healthy = row["health"] == "healthy" and row["streams"][0]["connected"]
            return bool(healthy and row["incarnation"] == 2)

        await eventually(renewed, "a restarted worker that counts as the old one")
        assert await one.index_equals_truth(again.url) == 0
        assert await one.metric("pointsman_worker_incarnation", worker=again.id) == 2

        await one.drain(other)
        for prompt in asked[:3]:
            reply = await one.complete(prompt)
            assert (reply.worker, reply.cached) == (again.id, 0)
            assert (await one.decision(reply))["path_blocks"] == {"recompute": 10}
        for prompt in prompts(4, 6):
            assert (await one.complete(prompt)).status == 200
        assert await one.index_equals_truth(again.url) == 30 + 18

        async def sure() -> bool:
            row = (await one.workers())[again.id]
            return bool(row["streams"][0]["suspect"] is None and row["incarnation"] == 2)

        await eventually(sure, "a worker found to be new more than once")


@pytest.mark.parametrize("lose_replay", [False, True])
async def test_100_dropped_batches_are_fetched_again_or_the_map_is_called_partial(
    tmp_path: Path, lose_replay: bool
) -> None:
    async with sim_workers(1) as (worker,), service([entry(worker)], tmp_path) as one:
        name = worker.url.removeprefix("http://")
        for prompt in prompts(5, 5):
            await one.complete(prompt)
        await one.index_equals_truth(worker.url)
        await order_faults(worker.url, drop_batches=100, lose_replay=lose_replay)
        for prompt in prompts(6, 130):
            assert (await one.complete(prompt)).status == 200
        assert worker.worker.faults.drop_batches == 0

        async def seen() -> bool:
            stream = await stream_of(one, name)
            return bool(stream["state"] == "live" and stream["seq"] == worker.worker.publisher.next_seq - 1)

        await eventually(seen, "batches that have not arrived")
        stream = await stream_of(one, name)
        assert stream["counters"]["gaps"] >= 1
        assert await one.metric("pointsman_kv_stream_total", worker=name, what="gaps") >= 1
        key = load_or_make_key(tmp_path / "hash.key")
        real = truth(await sim_state(one.session, worker.url), key, MODEL)
        known = one.known(name)
        if lose_replay:
            assert stream["partial"]
            assert await one.metric("pointsman_index_partial", worker=name) == 1
            assert name in (await one.get("/ready"))["degraded"]["partial_workers"]
            assert known.items() < real.items()
        else:
            assert stream["partial"] is None
            assert known == real


async def test_dropped_batches_of_a_worker_without_replay_make_its_map_partial(tmp_path: Path) -> None:
    async with sim_workers(1, replay=None) as (worker,), service([entry(worker)], tmp_path) as one:
        name = worker.url.removeprefix("http://")
        asked = prompts(7, 125)
        for prompt in asked[:5]:
            await one.complete(prompt)
        await one.index_equals_truth(worker.url)
        await order_faults(worker.url, drop_batches=100)
        for prompt in asked[5:]:
            assert (await one.complete(prompt)).status == 200

        async def partial() -> Any:
            return (await stream_of(one, name))["partial"]

        await eventually(partial, "lost batches that nobody noticed")
        assert await one.metric("pointsman_index_partial", worker=name) == 1
        assert await one.metric("pointsman_kv_stream_total", worker=name, what="gaps") == 1
        real = truth(await sim_state(one.session, worker.url), load_or_make_key(tmp_path / "hash.key"), MODEL)
        assert one.known(name).items() < real.items()
        # A hit that the map does not know of is no mistake to be counted; the next prompts are learnt again.
        await one.complete(asked[60])
        fresh = prompts(8, 1)[0]
        await one.complete(fresh)
        assert await one.metric("pointsman_stale_decisions_total") == 0


async def test_a_stream_full_of_rubbish_changes_nothing_in_the_index(tmp_path: Path) -> None:
    async with sim_workers(2) as workers, service([entry(w) for w in workers], tmp_path, CALM) as one:
        asked = prompts(9, 20)
        for prompt in asked[:10]:
            await one.complete(prompt)
        await asyncio.gather(
            *(order_faults(worker.url, rubbish=105) for worker in workers),
            *(one.complete(prompt) for prompt in asked[10:]),
        )
        for worker in workers:
            name = worker.url.removeprefix("http://")
            assert await one.index_equals_truth(worker.url) > 0

            async def all_read(name: str = name, worker: Any = worker) -> bool:
                return bool((await stream_of(one, name))["seq"] == worker.worker.publisher.next_seq - 1)

            await eventually(all_read, "rubbish that was not read")
            assert await one.index_equals_truth(worker.url) > 0
            stream = await stream_of(one, name)
            for effect in ("malformed_batches", "malformed_events", "unknown_events"):
                assert stream["events"][effect] >= 5, effect
                assert await one.metric("pointsman_kv_events_total", worker=name, effect=effect) >= 5
            assert stream["counters"]["gaps"] == 0
        reply = await one.complete(asked[0])
        assert (await one.decision(reply))["predicted_cached_tokens"] == reply.cached > 0


async def test_a_worker_that_serves_and_publishes_nothing_is_called_silent(tmp_path: Path) -> None:
    async with sim_workers(2) as workers, service([entry(w) for w in workers], tmp_path) as one:
        quiet, other = (worker.url.removeprefix("http://") for worker in workers)
        await order_faults(workers[0].url, silence=True)
        for prompt in prompts(10, 60):
            assert (await one.complete(prompt)).status == 200
        rows = await one.workers()
        assert rows[quiet]["event_silent"] is True
        assert rows[other]["event_silent"] is False
        assert await one.metric("pointsman_worker_event_silent", worker=quiet) == 1
        assert (await one.get("/ready"))["degraded"]["event_silent_workers"] == [quiet]
        # Both still get their share although one never shows a block.
        shares = [await one.metric("pointsman_attempts_total", worker=name) for name in (quiet, other)]
        assert min(shares) >= 8

        await order_faults(workers[0].url, silence=False)
        await one.drain(other)
        await one.complete(prompts(11, 1)[0])

        async def heard() -> bool:
            return not (await one.workers())[quiet]["event_silent"]

        await eventually(heard, "a worker that publishes again and is still called silent")
        assert await one.metric("pointsman_worker_event_silent", worker=quiet) == 0


async def test_a_worker_that_turns_silent_later_is_found_too(tmp_path: Path) -> None:
    async with sim_workers(1) as (worker,), service([entry(worker)], tmp_path) as one:
        name = worker.url.removeprefix("http://")
        for prompt in prompts(12, 8):
            await one.complete(prompt)
        await one.index_equals_truth(worker.url)
        assert (await one.workers())[name]["event_silent"] is False
        await order_faults(worker.url, silence=True)
        for prompt in prompts(13, 8):
            await one.complete(prompt)
        assert (await one.workers())[name]["event_silent"] is True
        await order_faults(worker.url, restart=True, clear=True)

        async def renewed() -> bool:
            row = (await one.workers())[name]
            return bool(row["incarnation"] == 2 and row["health"] == "healthy")

        await eventually(renewed, "a restart that was not noticed")
        # A new process has not been asked anything yet.
        assert (await one.workers())[name]["event_silent"] is False


async def test_the_best_holder_answering_500_loses_its_traffic_and_gets_it_back(tmp_path: Path) -> None:
    settings = {"fleet.backoff_min_s": 0.5}
    async with (
        sim_workers(4) as workers,
        service([entry(w) for w in workers], tmp_path, settings) as one,
    ):
        prompt = prompts(14, 1, blocks=40)[0]
        sick = (await one.complete(prompt)).worker
        url = f"http://{sick}"
        await one.index_equals_truth(url)
        await order_faults(url, error500=True)
        replies = [await one.complete(prompt) for _ in range(10)]
        before = await one.metric("pointsman_attempts_total", worker=sick)
        replies += [await one.complete(prompt) for _ in range(250)]
        tries = await one.metric("pointsman_attempts_total", worker=sick) - before
        assert {reply.status for reply in replies} == {200}
        assert sick not in {reply.worker for reply in replies}
        assert tries < 0.05 * 250
        row = (await one.workers())[sick]
        assert row["health"] == "backoff"
        assert row["consecutive_failures"] >= 3
        assert await one.metric("pointsman_worker_health", worker=sick, state="backoff") == 1

        await order_faults(url, clear=True)

        fresh = iter(prompts(15, 10_000, blocks=1))

        async def trusted() -> bool:
            await one.complete(next(fresh))
            return bool((await one.workers())[sick]["health"] == "healthy")

        await eventually(trusted, "a mended worker that gets no request")
        for other in workers:
            if other.url != url:
                await one.drain(other.url.removeprefix("http://"))
        reply = await one.complete(prompt)
        assert reply.worker == sick
        assert reply.cached > 0


async def test_bad_bodies_do_not_make_a_worker_look_broken(tmp_path: Path) -> None:
    bad: list[bytes | object] = [
        b"{",
        b"[]",
        {"model": MODEL},
        {"model": MODEL, "prompt": [1, "a"]},
        {"model": MODEL, "prompt": prompts(16, 1)[0], "max_tokens": "many"},
        {"model": "no-such-model", "prompt": "x"},
        {"model": MODEL, "prompt": list(range(200_000))},
    ]
    async with sim_workers(2) as workers, service([entry(w) for w in workers], tmp_path) as one:
        for turn in range(105):
            reply = await one.post("/v1/completions", bad[turn % len(bad)])
            assert reply.status in {400, 404}, (turn, reply)
        rows = (await one.workers()).values()
        assert {row["health"] for row in rows} == {"healthy"}
        assert {row["consecutive_failures"] for row in rows} == {0}
        assert await one.metric("pointsman_attempts_total", outcome="worker_error") == 0
        assert (await one.complete(prompts(17, 1)[0])).status == 200
        await one.idle()


async def test_clearing_a_worker_by_hand_empties_its_map_and_says_so(tmp_path: Path) -> None:
    async with sim_workers(1) as (worker,), service([entry(worker)], tmp_path) as one:
        name = worker.url.removeprefix("http://")
        prompt = prompts(18, 1)[0]
        await one.complete(prompt)
        await one.index_equals_truth(worker.url)
        reply = await one.post(f"/admin/api/index/{name}/clear", b"")
        assert reply.status == 200
        assert one.known(name) == {}
        assert (await stream_of(one, name))["partial"]
        reply = await one.complete(prompt)
        assert (await one.decision(reply))["predicted_cached_tokens"] == 0
        assert reply.cached > 0


async def test_a_sleeping_worker_loses_its_credit_although_no_event_says_so(tmp_path: Path) -> None:
    async with sim_workers(2) as workers, service([entry(w) for w in workers], tmp_path) as one:
        prompt = prompts(19, 1, blocks=30)[0]
        sleeper = (await one.complete(prompt)).worker
        await one.index_equals_truth(f"http://{sleeper}")
        async with one.session.post(f"http://{sleeper}/sleep") as answer:
            assert answer.status == 200

        async def asleep() -> bool:
            row = (await one.workers())[sleeper]
            return bool(
                row["asleep"] and "hbm" not in {t for tiers in one.known(sleeper).values() for t in tiers}
            )

        await eventually(asleep, "a sleeping worker with blocks in HBM")
        reply = await one.complete(prompt)
        assert (reply.status, reply.worker != sleeper) == (200, True)
