# SPDX-License-Identifier: Apache-2.0
"""The prompt is computed by one simulated worker and answered by another, through the whole service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
from eventually import eventually
from service import BLOCK, CALM, MODEL, Service, entry, order_faults, service, sim_workers

from engine_ext.sim.running import RunningSimWorker

BUSY = 400
"""Answers that seem to run on each decode worker, so that no prompt is computed beside them if that can be helped."""


@contextlib.asynccontextmanager
async def split_service(
    home: Path, decoders: int = 1, **settings: object
) -> AsyncIterator[tuple[Service, list[RunningSimWorker], RunningSimWorker]]:
    """A prefill worker and its decode workers behind the gateway, and a worker of no fleet to compare with."""
    async with sim_workers(2 + decoders) as workers:
        *fleet, other = workers
        entries = [
            msgspec.structs.replace(entry(worker), role="decode" if number else "prefill")
            for number, worker in enumerate(fleet)
        ]
        overrides = {**CALM, **{name.replace("__", "."): value for name, value in settings.items()}}
        async with service(entries, home, overrides) as one:
            for worker in fleet[1:]:
                occupy(one, worker)
            yield one, fleet, other


def occupy(one: Service, worker: RunningSimWorker) -> None:
    now_s = asyncio.get_running_loop().time()
    for _ in range(BUSY):
        one.app.brain.board.first_token(one.app.brain.board.promise(id_of(worker), 0, 0.0, 0.0, now_s), now_s)


def id_of(worker: RunningSimWorker) -> str:
    return worker.url.removeprefix("http://")


def prompt_of(seed: int, tokens: int = 200 * BLOCK + 3) -> list[int]:
    random = Random(seed)
    return [random.randrange(97, 123) for _ in range(tokens)]


async def text_alone(session: aiohttp.ClientSession, worker: RunningSimWorker, prompt: list[int]) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24}
    async with session.post(worker.url + "/v1/completions", json=body) as answer:
        text: str = (await answer.json())["choices"][0]["text"]
        return text


async def both_idle(one: Service) -> None:
    """Only the answers that merely seem to run are left."""

    async def quiet() -> bool:
        rows = await one.workers()
        return all(row["in_flight"] in (0, BUSY, 2 * BUSY) for row in rows.values())

    await eventually(quiet, "requests in flight")


async def test_a_split_request_has_the_text_of_one_worker_and_the_planned_counts(tmp_path: Path) -> None:
    prompt = prompt_of(1)
    async with split_service(tmp_path) as (one, (prefill, decode), other):
        reply = await one.complete(prompt, max_tokens=24)
        record: Any = await one.decision(reply)
        assert reply.status == 200
        assert reply.text == await text_alone(one.session, other, prompt)
        assert reply.headers["x-pointsman-prefill-worker"] == id_of(prefill) == record["prefill"]["worker"]
        assert reply.worker == id_of(decode) == record["worker"]
        assert reply.headers["x-pointsman-path"] == "peer:200,recompute:1"
        assert reply.cached == record["predicted_cached_tokens"] == 200 * BLOCK
        assert record["prefill"]["observed"]["outcome"] == record["observed"]["outcome"] == "ok"
        assert record["prefill"]["path_blocks"] == {"recompute": 201}
        assert await one.metric("pointsman_split_requests_total", transfer="p2p") == 1
        await both_idle(one)


async def test_a_prompt_known_to_the_prefill_worker_is_handed_over_without_computing_it(
    tmp_path: Path,
) -> None:
    prompt = prompt_of(2)
    async with split_service(tmp_path, decoders=2, plan__use_peers=False) as (
        one,
        (prefill, first, second),
        other,
    ):
        await one.drain(id_of(second))
        await one.complete(prompt)
        for worker in (prefill, first):
            await one.index_equals_truth(worker.url)
        await one.drain(id_of(second), draining=False)
        await one.drain(id_of(first))
        reply = await one.complete(prompt, max_tokens=24)
        record = await one.decision(reply)
        assert (reply.worker, record["prefill"]["worker"]) == (id_of(second), id_of(prefill))
        assert record["prefill"]["path_blocks"] == {"hbm": 200, "recompute": 1}
        assert record["prefill"]["observed"]["cached_tokens"] == 200 * BLOCK
        assert reply.cached == record["predicted_cached_tokens"]
        assert reply.text == await text_alone(one.session, other, prompt)


async def test_a_failing_prefill_worker_costs_one_attempt(tmp_path: Path) -> None:
    prompt = prompt_of(3)
    async with split_service(tmp_path) as (one, (prefill, decode), other):
        await order_faults(prefill.url, error500=True)
        reply = await one.complete(prompt, max_tokens=24)
        record = await one.decision(reply)
        assert (reply.status, reply.worker) == (200, id_of(decode))
        assert reply.text == await text_alone(one.session, other, prompt)
        [first] = record["earlier_attempts"]
        assert first["prefill"]["observed"]["status"] == 500
        assert first["observed"]["outcome"] == "cancelled"
        assert record["prefill"] is None
        assert "x-pointsman-prefill-worker" not in reply.headers
        await both_idle(one)


async def test_a_failing_decode_worker_is_replaced(tmp_path: Path) -> None:
    prompt = prompt_of(4)
    async with split_service(tmp_path, decoders=2) as (one, (_, *decoders), other):
        occupy(one, decoders[1])  # so that the other one is chosen first
        await order_faults(decoders[0].url, error500=True)
        reply = await one.complete(prompt, max_tokens=24)
        record = await one.decision(reply)
        assert (reply.status, reply.worker) == (200, id_of(decoders[1]))
        assert reply.text == await text_alone(one.session, other, prompt)
        [first] = record["earlier_attempts"]
        assert (first["worker"], first["observed"]["status"]) == (id_of(decoders[0]), 500)
        assert first["prefill"]["observed"]["outcome"] in ("ok", "cancelled")
        assert record["prefill"] is None
        await both_idle(one)


async def test_several_sequences_are_answered_by_the_decode_worker_alone(tmp_path: Path) -> None:
    prompt = prompt_of(5)
    async with split_service(tmp_path) as (one, (_, decode), _other):
        for body in ({"prompt": prompt, "n": 2}, {"prompt": [prompt, prompt]}):
            reply = await one.post("/v1/completions", {"model": MODEL, "max_tokens": 1, **body})
            assert (reply.status, reply.worker) == (200, id_of(decode))
            assert (await one.decision(reply))["prefill"] is None
        await both_idle(one)


async def test_a_client_that_leaves_frees_both_workers(tmp_path: Path) -> None:
    async with split_service(tmp_path) as (one, (prefill, decode), _other):
        body = {"model": MODEL, "prompt": prompt_of(6), "max_tokens": 2000, "stream": True}
        async with one.session.post(one.url + "/v1/completions", json=body) as answer:
            assert answer.headers["x-pointsman-prefill-worker"] == id_of(prefill)
            await answer.content.readany()
            answer.close()
        await both_idle(one)
        assert await one.metric("pointsman_attempts_total", worker=id_of(decode), outcome="client_gone") == 1


async def test_without_its_prefill_worker_the_fleet_goes_on_and_says_so(tmp_path: Path) -> None:
    async with split_service(tmp_path) as (one, (prefill, decode), _other):
        await one.drain(id_of(prefill))
        reply = await one.complete(prompt_of(7))
        assert (reply.status, reply.worker) == (200, id_of(decode))
        assert (await one.decision(reply))["prefill"] is None
        one.app.brain.fleet.remove(id_of(prefill))
        assert (await one.get("/ready"))["degraded"]["models_without_prefill_worker"] == [MODEL]
