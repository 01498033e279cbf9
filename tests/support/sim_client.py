# SPDX-License-Identifier: Apache-2.0
"""A simulated worker as a process on loopback: real HTTP, real ZMQ, in the event loop of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import zmq
import zmq.asyncio

from engine_ext.sim.config import SimConfig
from engine_ext.sim.publisher import END_OF_REPLAY
from engine_ext.sim.running import RunningSimWorker, SimWorkerOptions, running_sim_worker

PROMPT = "a prompt that fills a few blocks of sixteen bytes, and then a little more"


@dataclass
class Client:
    """A worker and an HTTP session on it."""

    running: RunningSimWorker
    session: aiohttp.ClientSession
    extra: dict[str, object] = field(default_factory=dict)

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with self.session.request(method, self.running.url + path, data=data) as response:
            return response.status, await response.text()

    async def json(self, method: str, path: str, body: object = None) -> dict:
        status, text = await self.call(method, path, body)
        assert status == 200, text
        return json.loads(text)

    async def complete(self, prompt: object = PROMPT, **more: object) -> dict:
        return await self.json("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 4, **more})

    async def faults(self, **order: object) -> dict:
        return await self.json("POST", "/sim/faults", order)


@contextlib.asynccontextmanager
async def serving(**options: object) -> AsyncIterator[Client]:
    defaults = {"profile": "fast", "p2p_port": 0, "engine": SimConfig(hbm_blocks=256, ram_blocks=256)}
    async with (
        running_sim_worker(SimWorkerOptions(**{**defaults, **options})) as running,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
    ):
        yield Client(running, session)


def parse_events(text: str) -> list[object]:
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


async def replay(client: Client, start: int) -> list[tuple[int, bytes]]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(client.running.replay)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[tuple[int, bytes]] = []
        while True:
            async with asyncio.timeout(20):
                empty, _topic, seq, payload = await dealer.recv_multipart()
            assert empty == b""
            if seq == END_OF_REPLAY:
                return batches
            batches.append((int.from_bytes(seq, "big"), payload))
