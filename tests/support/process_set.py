# SPDX-License-Identifier: Apache-2.0
"""``pointsman serve --processes N`` or ``pointsman epp --processes N`` as a test sees them: who is which process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from eventually import eventually
from service import MODEL

from engine_ext.sim.running import RunningSimWorker

PATIENCE_S = 120.0
"""A loaded machine takes a minute to start three interpreters."""


@dataclass
class Door:
    """One connection, and the process at its other end."""

    session: aiohttp.ClientSession
    url: str
    process: int
    pid: int

    async def complete(self, prompt: Sequence[int], **more: object) -> tuple[dict[str, str], Any]:
        body = {"model": MODEL, "prompt": list(prompt), "max_tokens": 1, **more}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return {name.lower(): value for name, value in answer.headers.items()}, await answer.json()

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as answer:
            assert answer.status == 200, (path, answer.status, await answer.text())
            return await answer.json()

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels."""
        async with self.session.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        total = 0.0
        for line in text.splitlines():
            key, _, value = line.rpartition(" ")
            if key.partition("{")[0] == name and all(f'{k}="{v}"' in key for k, v in labels.items()):
                total += float(value)
        return total


@dataclass
class ProcessSet:
    """A supervisor and what it started."""

    process: subprocess.Popen[bytes]
    told: dict[str, str]
    doors: list[aiohttp.ClientSession] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.told["url"]

    def children(self) -> set[int]:
        """Ids of the processes that live."""
        try:
            text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except FileNotFoundError:
            return set()
        return {int(one) for one in text.split()}

    async def door(self, process: int) -> Door:
        """A new connection to that process."""

        async def found() -> Door | None:
            connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=3600)
            session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60))
            try:
                async with session.get(f"{self.url}/health") as answer:
                    health = await answer.json()
            except aiohttp.ClientError:
                await session.close()
                return None
            if health["process"] != process:
                await session.close()
                return None
            self.doors.append(session)
            return Door(session, self.url, process, health["pid"])

        return await eventually(found, f"connections that are not to process {process}", PATIENCE_S)

    async def keeper(self) -> int:
        """The id of the keeper: the child that serves nobody."""
        serving = {(await self.door(0)).pid, (await self.door(1)).pid}
        [keeper] = self.children() - serving
        return keeper

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), PATIENCE_S)


@contextlib.asynccontextmanager
async def process_set(
    command: Sequence[str], workers: Sequence[RunningSimWorker], home: Path, **settings: str
) -> AsyncIterator[ProcessSet]:
    """A set of two that serve these workers; ``settings`` are variables without their prefix."""
    arguments = [sys.executable, "-P", "-m", "router", *command, "--processes", "2"]
    for worker in workers:
        arguments += ["--worker", f"{worker.url},events={worker.events},replay={worker.replay}"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POINTSMAN_")}
    given = {
        "XDG_STATE_HOME": str(home),
        "POINTSMAN_FLEET__POLL_INTERVAL_S": "0.1",
        "POINTSMAN_FLEET__POLL_TIMEOUT_S": "20",
        "POINTSMAN_TOKENS__WORKER_TIMEOUT_S": "30",
        **{f"POINTSMAN_{name.upper()}": value for name, value in settings.items()},
    }
    process = await asyncio.to_thread(
        subprocess.Popen, arguments, stdout=subprocess.PIPE, env={**kept, **given}
    )
    assert process.stdout is not None
    one: ProcessSet | None = None
    try:
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), PATIENCE_S)
        one = ProcessSet(process, json.loads(line))
        yield one
    finally:
        for session in one.doors if one is not None else ():
            await session.close()
        if process.poll() is None:
            process.terminate()
        try:
            await asyncio.to_thread(process.wait, PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
