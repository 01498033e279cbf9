# SPDX-License-Identifier: Apache-2.0
"""The prompt is computed by one simulated worker, the answer goes through Envoy to another: vLLM's P2P tier.

The proxy sends the request to the worker that decodes, and the picker the prefill leg beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
import pytest
from envoy_proxy import EnvoySettings
from eventually import eventually
from service import BLOCK, MODEL, entry, order_faults, sim_workers

from engine_ext.sim.running import RunningSimWorker

from .conftest import Front, address, front

BUSY = 400
"""Answers that seem to run on the decode worker, so that no prompt is computed beside them if that can be helped."""
TOKENS = 200 * BLOCK + 3


def prompt_of(seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(97, 123) for _ in range(TOKENS)]


@contextlib.asynccontextmanager
async def split_front(
    home: Path, settings: EnvoySettings | None = None, **overrides: object
) -> AsyncIterator[tuple[Front, RunningSimWorker, RunningSimWorker, RunningSimWorker]]:
    """A front, its prefill worker, its decode worker, and a worker of no fleet to compare with."""
    more = {key.replace("__", "."): value for key, value in overrides.items()}
    async with sim_workers(3) as (prefill, decode, other):
        entries = [
            msgspec.structs.replace(entry(prefill), role="prefill"),
            msgspec.structs.replace(entry(decode), role="decode"),
        ]
        async with front(entries, home, settings, more, known=[address(decode.url)]) as one:
            board, now_s = one.app.brain.board, asyncio.get_running_loop().time()
            for _ in range(BUSY):
                board.first_token(board.promise(address(decode.url), 0, 0.0, 0.0, now_s), now_s)
            yield one, prefill, decode, other


async def only_busy(one: Front) -> None:
    async def so() -> bool:
        return one.in_flight() == BUSY and one.app.processor.open_streams == 0

    await eventually(so, "load or streams that are never released")


async def text_alone(session: aiohttp.ClientSession, worker: RunningSimWorker, prompt: list[int]) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24}
    async with session.post(worker.url + "/v1/completions", json=body) as answer:
        text: str = (await answer.json())["choices"][0]["text"]
        return text


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_a_split_request_has_the_text_of_one_worker_and_the_planned_counts(
    tmp_path: Path, mode: str
) -> None:
    prompt = prompt_of(1)
    settings = EnvoySettings(request_mode=mode, response_mode=mode)
    async with split_front(tmp_path, settings) as (one, prefill, decode, other):
        steering = {"x-prefiller-host-port": "192.0.2.1:1", "x-mine": "kept"}
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 24}
        reply = await one.proxy.post("/v1/completions?a=b", body, steering)
        assert reply.status == 200, reply.body
        assert reply.text == await text_alone(one.session, other, prompt)
        assert reply.worker == address(decode.url)
        assert reply.headers["x-pointsman-prefill-worker"] == address(prefill.url)
        assert reply.cached == 200 * BLOCK
        await only_busy(one)
        record: Any = await one.desk.decision(reply)
        leg = record["prefill"]
        assert (leg["worker"], leg["observed"]["outcome"]) == (address(prefill.url), "ok")
        assert leg["observed"]["prompt_tokens"] == TOKENS
        assert record["observed"]["outcome"] == "ok"

        headers, sent = await one.last_request(prefill.url)
        asked = json.loads(sent)
        assert sent.startswith(json.dumps(body).encode()[:-1]), "the client's bytes, with keys behind them"
        assert (asked["max_tokens"], asked["n"], asked["stream"]) == (1, 1, False)
        taken = (await one.last_document(decode.url))["kv_transfer_params"]["remote_prefiller"]
        assert asked["kv_transfer_params"]["remote_decoder"] == {"kv_request_id": taken["kv_request_id"]}
        assert headers["x-mine"] == "kept"
        assert not [name for name in headers if name.startswith(":") or name == "x-prefiller-host-port"]
        decode_headers, _ = await one.last_request(decode.url)
        assert "x-prefiller-host-port" not in decode_headers, "no sidecar sends a second prefill leg"


async def test_a_failing_prefill_worker_ends_no_answer(tmp_path: Path) -> None:
    prompt = prompt_of(2)
    async with split_front(tmp_path) as (one, prefill, decode, other):
        await order_faults(prefill.url, error500=True)
        reply = await one.proxy.complete(prompt, max_tokens=24)
        assert (reply.status, reply.worker) == (200, address(decode.url))
        assert reply.text == await text_alone(one.session, other, prompt)
        await only_busy(one)
        record = await one.desk.decision(reply)
        assert (record["prefill"]["observed"]["outcome"], record["prefill"]["observed"]["status"]) == (
            "worker_error",
            500,
        )


async def test_a_client_that_leaves_frees_both_workers(tmp_path: Path) -> None:
    async with split_front(tmp_path) as (one, prefill, decode, _):
        body = {"model": MODEL, "prompt": prompt_of(3), "max_tokens": 2000, "stream": True}
        async with one.session.post(one.proxy.url + "/v1/completions", json=body) as answer:
            assert answer.headers["x-pointsman-prefill-worker"] == address(prefill.url)
            await answer.content.readany()
            answer.close()
        await only_busy(one)
        gone = await one.desk.metric(
            "pointsman_attempts_total", worker=address(decode.url), outcome="client_gone"
        )
        assert gone == 1


async def test_a_client_that_leaves_before_the_answer_cancels_the_prefill(tmp_path: Path) -> None:
    async with split_front(tmp_path) as (one, prefill, decode, _):
        for worker in (prefill, decode):
            await order_faults(worker.url, hang=True)
        body = {"model": MODEL, "prompt": prompt_of(4), "stream": True}
        asking = asyncio.create_task(one.proxy.post("/v1/completions", body))

        async def under_way() -> bool:
            return one.in_flight() == BUSY + 2

        await eventually(under_way, "a request that is not split")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await only_busy(one)
        cancelled = await one.desk.metric(
            "pointsman_attempts_total", worker=address(prefill.url), outcome="cancelled"
        )
        assert cancelled == 1
