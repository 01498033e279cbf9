# SPDX-License-Identifier: Apache-2.0
"""The whole service on loopback: simulated workers, the real app under its real server, a client."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from eventually import PATIENCE_S, eventually
from index_truth import indexed, truth

from engine_ext.sim.config import SimConfig
from engine_ext.sim.running import RunningSimWorker, SimWorkerOptions, running_sim_worker
from indexer.hashing import load_or_make_key
from router.app import PointsmanApp
from router.config import load
from router.config_addresses import worker_id_of_url
from router.config_fleet import WorkerEntry
from router.serve import running_gateway

MODEL = "sim-model"
BLOCK = 16
CALM: Mapping[str, object] = {"fleet.poll_interval_s": 3600.0}
"""No poll after the first, whose sample of a busy moment could outweigh the few blocks of a test's prompt."""
QUICK = 20.0  # workers run so many times faster than their profile


@dataclass(frozen=True)
class Reply:
    """An answer of the gateway."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def worker(self) -> str:
        return self.headers["x-pointsman-worker"]

    @property
    def text(self) -> str:
        choice = self.json["choices"][0]
        text: str = choice["message"]["content"] if "message" in choice else choice["text"]
        return text

    @property
    def cached(self) -> int:
        cached: int = self.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached


@dataclass
class Service:
    """A running gateway and what tests ask of it."""

    app: PointsmanApp
    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, body: bytes | object, headers: Mapping[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        async with self.session.post(self.url + path, data=io.BytesIO(data), headers=sent) as answer:
            headers_got = {name.lower(): value for name, value in answer.headers.items()}
            return Reply(answer.status, headers_got, await answer.read())

    async def complete(self, prompt: str | Sequence[int], max_tokens: int = 1, **more: object) -> Reply:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, **more}
        return await self.post("/v1/completions", body)

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as answer:
            assert answer.status == 200, (path, answer.status, await answer.text())
            return await answer.json()

    async def decision(self, reply: Reply) -> Any:
        return await self.get(f"/admin/api/decisions/{reply.headers['x-request-id']}")

    async def workers(self) -> dict[str, Any]:
        rows = (await self.get("/admin/api/workers"))["workers"]
        return {row["id"]: row for row in rows}

    async def drain(self, worker: str, draining: bool = True) -> None:
        url = f"{self.url}/admin/api/workers/{worker}/drain"
        async with self.session.put(url, json={"draining": draining}) as answer:
            assert answer.status == 200

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels."""
        async with self.session.get(self.url + "/metrics") as answer:
            text = await answer.text()
        total = 0.0
        for line in text.splitlines():
            key, _, value = line.rpartition(" ")
            if key.partition("{")[0] == name and all(f'{k}="{v}"' in key for k, v in labels.items()):
                total += float(value)
        return total

    async def idle(self) -> None:
        """Wait until nothing is in flight."""

        async def quiet() -> bool:
            return all(row["in_flight"] == 0 for row in (await self.workers()).values())

        await eventually(quiet, "requests in flight")

    async def connected(self) -> None:
        """Wait until every event stream is up and has its history."""

        async def up() -> bool:
            rows = (await self.workers()).values()
            streams = [stream for row in rows for stream in row["streams"] if stream["state"] is not None]
            return bool(streams) and all(s["connected"] and s["state"] == "live" for s in streams)

        await eventually(up, "event streams that are not live")

    def known(self, worker: str) -> dict[int, frozenset[str]]:
        return indexed(self.app.brain.holders, worker)

    async def index_equals_truth(self, worker_url: str, patience_s: float = PATIENCE_S) -> int:
        """Wait until the index has of a worker exactly what it holds; returns the number of blocks."""
        key = load_or_make_key(Path(self.app.config.index.hash_key_file or ""))
        worker = worker_id_of_url(worker_url)

        async def same() -> bool:
            state = await sim_state(self.session, worker_url)
            return bool(truth(state, key, MODEL) == self.known(worker))

        await eventually(same, f"an index that differs from what {worker} holds", patience_s)
        return len(self.known(worker))


async def sim_state(session: aiohttp.ClientSession, worker_url: str) -> Any:
    async with session.get(worker_url + "/sim/state") as answer:
        return await answer.json()


async def order_faults(worker_url: str, **faults: object) -> None:
    # A session of its own: a connection left from before may be about to close.
    async with (
        aiohttp.ClientSession() as session,
        session.post(worker_url + "/sim/faults", json=faults) as answer,
    ):
        assert answer.status == 200, await answer.text()


def entry(worker: RunningSimWorker, *, replay: bool = True) -> WorkerEntry:
    return WorkerEntry(
        url=worker.url,
        id=worker_id_of_url(worker.url),
        events=worker.events,
        replay=worker.replay if replay else None,
        p2p=worker.p2p,
    )


@contextlib.asynccontextmanager
async def sim_workers(count: int, **options: Any) -> AsyncIterator[list[RunningSimWorker]]:
    """Simulated workers in this process."""
    options = {"time_scale": QUICK, "p2p_port": 0, "engine": SimConfig(ram_blocks=4096), **options}
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(running_sim_worker(SimWorkerOptions(**options)))
            for _ in range(count)
        ]


@contextlib.asynccontextmanager
async def service(
    workers: Sequence[WorkerEntry], home: Path, overrides: Mapping[str, object] | None = None
) -> AsyncIterator[Service]:
    """The gateway in front of these workers; workers are polled often, so that tests wait little."""
    settings = {
        "server.port": 0,
        "index.hash_key_file": str(home / "hash.key"),
        "fleet.poll_interval_s": 0.1,
        "fleet.poll_timeout_s": 10.0,
        "tokens.worker_timeout_s": 20.0,
        **(overrides or {}),
    }
    config = load(None, environ={}, overrides=settings, workers=workers)
    async with contextlib.AsyncExitStack() as stack:
        app, url = await stack.enter_async_context(running_gateway(config))
        connector = aiohttp.TCPConnector(limit=0, force_close=False)
        timeout = aiohttp.ClientTimeout(total=60)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        one = Service(app, url, session)
        if any(worker.events for worker in workers):
            await one.connected()
        yield one


@dataclass
class WorkerProcess:
    """``pointsman sim-worker`` in a process of its own, that can be killed and started again where it was."""

    url: str
    events: str | None
    replay: str | None
    p2p: str | None
    process: subprocess.Popen[bytes]
    arguments: tuple[str, ...]
    started_at_s: float

    @classmethod
    async def start(cls, *arguments: str, port: int = 0, events: str = "tcp://127.0.0.1:0") -> WorkerProcess:
        command = [
            sys.executable,
            "-P",
            "-m",
            "router",
            "sim-worker",
            "--port",
            str(port),
            "--events",
            events,
        ]
        command += ["--time-scale", str(QUICK), "--ram-blocks", "4096", *arguments]
        process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        told = json.loads(line)
        return cls(
            told["http"], told["events"], told["replay"], told["p2p"], process, arguments, time.monotonic()
        )

    @property
    def id(self) -> str:
        return worker_id_of_url(self.url)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    async def start_again(self) -> None:
        """A new process at the same addresses, more than a second after the first.

        Start times that differ by less are taken for readings of one process; a real engine starts slower.
        """

        async def late_enough() -> bool:
            return time.monotonic() > self.started_at_s + 1.5

        await eventually(late_enough, "the clock")
        arguments = [a if a != "tcp://127.0.0.1:0" else self.replay or "" for a in self.arguments]
        port = int(self.url.rpartition(":")[2])
        again = await WorkerProcess.start(*arguments, port=port, events=self.events or "")
        self.close()
        self.process, self.started_at_s = again.process, again.started_at_s

    def entry(self) -> WorkerEntry:
        return WorkerEntry(url=self.url, id=self.id, events=self.events, replay=self.replay, p2p=self.p2p)

    def close(self) -> None:
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.asynccontextmanager
async def worker_processes(count: int, *arguments: str) -> AsyncIterator[list[WorkerProcess]]:
    """Worker processes with a replay socket only if ``arguments`` say so."""
    started = await asyncio.gather(*(WorkerProcess.start(*arguments) for _ in range(count)))
    try:
        yield list(started)
    finally:
        for one in started:
            one.close()
