# SPDX-License-Identifier: Apache-2.0
"""A prompt held by one worker is served by another, which pulls it because our planner said where from."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from service import BLOCK, MODEL, Service, entry, order_faults, service, sim_state, sim_workers

from engine_ext.sim.running import RunningSimWorker


async def pulled_tokens(session: aiohttp.ClientSession, worker: RunningSimWorker) -> float:
    async with session.get(worker.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    samples = [line for line in lines if "by_source" in line and 'source="p2p"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in samples)


async def text_of_cold_run(session: aiohttp.ClientSession, worker: RunningSimWorker, body: object) -> Any:
    async with session.post(worker.url + "/v1/completions", json=body) as answer:
        document = await answer.json()
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return document["choices"][0]["text"]


async def held_by_first_only(
    one: Service, workers: list[RunningSimWorker], prompt: list[int]
) -> tuple[str, str]:
    """Let the first worker serve the prompt, then take it out of service; ids of the two workers."""
    first, second = (worker.url.removeprefix("http://") for worker in workers[:2])
    await one.drain(second)
    assert (await one.complete(prompt)).worker == first
    for worker in workers[:2]:
        await one.index_equals_truth(worker.url)
    await one.drain(first)
    await one.drain(second, draining=False)
    return first, second


async def test_a_prompt_held_by_a_drained_worker_is_pulled_from_it(tmp_path: Path) -> None:
    prompt = [Random(1).randrange(97, 123) for _ in range(200 * BLOCK + 3)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24}
    async with sim_workers(3) as workers, service([entry(w) for w in workers[:2]], tmp_path) as one:
        first, second = await held_by_first_only(one, workers, prompt)
        reply = await one.complete(prompt, max_tokens=24)
        record = await one.decision(reply)

        assert reply.worker == second == record["worker"]
        assert record["source"] == first
        assert record["path_blocks"] == {"peer": 200, "recompute": 1}
        assert reply.headers["x-pointsman-path"] == "peer:200,recompute:1"
        source = record["transfer_params"]["remote_kv_source"]
        assert f"{source['remote_host']}:{source['remote_port']}" == workers[0].p2p

        assert record["predicted_cached_tokens"] == reply.cached == 200 * BLOCK
        assert await pulled_tokens(one.session, workers[1]) == 200 * BLOCK
        assert (await sim_state(one.session, workers[0].url))["pulls_served"] == 1
        assert reply.text == await text_of_cold_run(one.session, workers[2], body)
        assert await one.index_equals_truth(workers[1].url) >= 200
        assert await one.metric("pointsman_path_blocks_total", path="peer") == 200


async def test_each_attempt_at_a_pull_has_an_id_of_its_own(tmp_path: Path) -> None:
    prompt = [Random(2).randrange(97, 123) for _ in range(200 * BLOCK)]
    async with sim_workers(3) as workers, service([entry(w) for w in workers], tmp_path) as one:
        third = workers[2].url.removeprefix("http://")
        await one.drain(third)
        await held_by_first_only(one, workers, prompt)
        await one.drain(third, draining=False)
        for worker in workers[1:]:
            await order_faults(worker.url, error500=True)
        reply = await one.complete(prompt)
        assert reply.status == 500
        last = await one.decision(reply)
        attempts = [*last["earlier_attempts"], last]
        ids = {a["transfer_params"]["remote_kv_source"]["kv_request_id"] for a in attempts}
        assert len(ids) == len(attempts) == 2
        assert {a["worker"] for a in attempts} == {w.url.removeprefix("http://") for w in workers[1:]}


async def test_several_sequences_are_never_told_to_pull(tmp_path: Path) -> None:
    prompt = [Random(3).randrange(97, 123) for _ in range(200 * BLOCK)]
    async with sim_workers(2) as workers, service([entry(w) for w in workers], tmp_path) as one:
        await held_by_first_only(one, workers, prompt)
        for body in ({"prompt": prompt, "n": 2}, {"prompt": [prompt, prompt]}):
            reply = await one.post("/v1/completions", {"model": MODEL, "max_tokens": 1, **body})
            assert reply.status == 200
            record = await one.decision(reply)
            assert record["source"] is None
            assert record["transfer_params"] is None


async def test_a_source_that_lost_its_blocks_costs_time_and_never_the_text(tmp_path: Path) -> None:
    prompt = [Random(4).randrange(97, 123) for _ in range(200 * BLOCK)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24}
    async with sim_workers(3) as workers, service([entry(w) for w in workers[:2]], tmp_path) as one:
        first, second = await held_by_first_only(one, workers, prompt)
        # What the source forgets now, no event tells.
        await order_faults(workers[0].url, silence=True)
        async with one.session.post(workers[0].url + "/reset_prefix_cache?reset_external=true") as answer:
            assert answer.status == 200
        reply = await one.complete(prompt, max_tokens=24)
        record = await one.decision(reply)
        assert (reply.status, reply.worker, record["source"]) == (200, second, first)
        assert reply.cached == 0
        assert record["observed"]["stale"] is True
        assert await one.metric("pointsman_stale_decisions_total", worker=second) == 1
        assert reply.text == await text_of_cold_run(one.session, workers[2], body)
