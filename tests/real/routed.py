# SPDX-License-Identifier: Apache-2.0
"""The router's gateway in front of real workers, and how to wait until its index has all that they say."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp

from indexer.identity import Tier, WorkerId
from indexer.index import PrefixIndex
from router.app import PointsmanApp
from router.config import load
from router.config_fleet import WorkerEntry
from router.serve import running_gateway

from .engine import RealWorker
from .events import next_seq
from .launch import BLOCK_SIZE_TOKENS, MODEL_NAME, Extension, Offload

Pair = tuple[RealWorker, ...]
Role = Literal["both", "prefill", "decode"]
SETTLE_TIMEOUT_S = 60


class OneBitOff:
    """An index whose hash of a request differs from that of the events in one bit."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def hash_blocks(self, *args: Any) -> bytes:
        hashes = bytearray(self._index.hash_blocks(*args))
        for i in range(0, len(hashes), 8):
            hashes[i] ^= 1
        return bytes(hashes)


@dataclass(frozen=True, slots=True)
class Gateway:
    app: PointsmanApp
    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer and the decision record behind it."""
        async with self.session.post(
            self.url + path, json={"model": MODEL_NAME, "temperature": 0} | body
        ) as response:
            answer = await response.json()
            assert response.status == 200, answer
            request_id = response.headers["x-request-id"]
        return answer, await self.get(f"/admin/api/decisions/{request_id}")

    async def complete(self, prompt: Sequence[int], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return await self.post(
            "/v1/completions", {"prompt": list(prompt), "max_tokens": 8, "ignore_eos": True} | more
        )

    async def get(self, path: str) -> dict[str, Any]:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            found: dict[str, Any] = await response.json()
            return found

    async def drain(self, worker: RealWorker, wanted: bool) -> None:
        path = f"{self.url}/admin/api/workers/127.0.0.1:{worker.ports.http}/drain"
        async with self.session.put(path, json={"draining": wanted}) as response:
            assert response.status == 200, await response.text()


@asynccontextmanager
async def gateway(
    pair: Pair,
    tmp_path: Path,
    *,
    recompute_s_per_token: float | None = None,
    roles: Sequence[Role] = ("both",) * 9,
    more: Mapping[str, object] | None = None,
) -> AsyncIterator[Gateway]:
    """A gateway in front of the workers; ``more`` settings replace those that tests share."""
    overrides: dict[str, object] = {
        "server.port": 0,
        "index.hash_key_file": str(tmp_path / "hash.key"),
        "tokens.local": [{"model": MODEL_NAME, "path": str(pair[0].model_dir)}],
        "costs.profile": "cpu-tiny",
    }
    if recompute_s_per_token is not None:
        overrides["costs.overrides"] = {"prefill_s_per_token": recompute_s_per_token}
    workers = [
        WorkerEntry(
            url=w.url,
            events=w.events,
            replay=w.replay,
            p2p=w.p2p,
            extension=w.peer,
            role=role,
            transfer="nixl" if w.config.nixl else None,
            chunk_blocks=offload.blocks_per_chunk if (offload := host_tier(w)) else 1,
        )
        for w, role in zip(pair, roles, strict=False)
    ]
    config = load(None, environ={}, overrides=overrides | dict(more or {}), workers=workers)
    async with running_gateway(config) as (app, url), aiohttp.ClientSession() as session:
        one = Gateway(app, url, session)
        for worker in pair:
            await settled(one, worker)
        await until(
            lambda: all(status.parity.value == "equal" for status in app.brain.fleet.statuses()),
            "tokenizer parity",
        )
        yield one


def host_tier(worker: RealWorker) -> Offload | Extension | None:
    return worker.config.offload or worker.config.extension


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"{what}: not within {SETTLE_TIMEOUT_S} s"
        await asyncio.sleep(0.01)


async def settled(gateway: Gateway, worker: RealWorker, prompt: Sequence[int] = ()) -> None:
    """Wait until the index has everything the engine has to say, all of ``prompt`` on every tier among it.

    vLLM's publisher answers a replay before it takes the next event from its queue, so one replay may miss what
    is about to be published; two that agree, after the prompt's own events, miss nothing.
    """
    name = WorkerId(f"127.0.0.1:{worker.ports.http}")
    offload = host_tier(worker)
    index = gateway.app.brain.holders.index
    honest = index._index if isinstance(index, OneBitOff) else index
    hashes = honest.hash_blocks(array("I", prompt), BLOCK_SIZE_TOKENS, MODEL_NAME, "", [])
    # Without self-describing events a chunk is one event, and so one block, however many it holds.
    chunk = BLOCK_SIZE_TOKENS * (
        1 if offload is None or offload.self_describing else offload.blocks_per_chunk
    )
    wanted = {Tier.HBM: len(prompt) // BLOCK_SIZE_TOKENS, Tier.RAM: len(prompt) // chunk if offload else 0}

    def known(tier: Tier) -> int:
        runs = gateway.app.brain.holders.runs(hashes)
        return sum(run.end - run.start for owner, run in runs if owner.worker == name and run.tier is tier)

    def applied() -> int:
        holders = gateway.app.brain.holders.workers().get(name)
        return -1 if holders is None or holders.ranks[0].seq is None else holders.ranks[0].seq

    for tier, blocks in wanted.items():
        await until(lambda tier=tier, blocks=blocks: known(tier) >= blocks, f"{tier.label} of {name}")
    published: list[int] = []
    while len(published) < 2 or published[-1] != published[-2]:
        published.append(await asyncio.to_thread(next_seq, worker.replay, SETTLE_TIMEOUT_S))
    await until(lambda: applied() >= published[-1] - 1, f"events up to {published[-1] - 1} of {name}")


def by_name(pair: Pair, name: str) -> RealWorker:
    return next(worker for worker in pair if name == f"127.0.0.1:{worker.ports.http}")
