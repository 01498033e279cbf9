# SPDX-License-Identifier: Apache-2.0
"""Which picker is looked at: the one that was named, or ours in front of simulated workers.

pytest tests/contract/epp --endpoint HOST:PORT [--health HOST:PORT] [--model NAME]
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from picker_client import PickerClient, picker_client
from service import MODEL


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("endpoint picker")
    group.addoption("--endpoint", metavar="HOST:PORT", help="ext_proc port of the picker to look at")
    group.addoption("--health", metavar="HOST:PORT", help="its gRPC health port")
    group.addoption("--model", default=MODEL, help=f"a model that it serves (default: {MODEL})")


@dataclass(frozen=True)
class Subject:
    """A picker, somebody's or ours."""

    client: PickerClient
    health: str | None
    model: str

    def completion(self, prompt: str = "hello", **more: object) -> bytes:
        return json.dumps({"model": self.model, "prompt": prompt, "max_tokens": 4, **more}).encode()

    async def endpoints(self, tries: int = 12) -> list[str]:
        """Endpoints that it is seen to pick, whole lists included."""
        found: dict[str, None] = {}
        for number in range(tries):
            found.update(dict.fromkeys(await self.client.pick(self.completion(f"prompt {number}"))))
        return list(found)


def _told(process: subprocess.Popen[bytes]) -> dict[str, str]:
    """The addresses that a command prints when it listens."""
    assert process.stdout is not None
    told: dict[str, str] = json.loads(process.stdout.readline())
    return told


@contextlib.contextmanager
def _ours(home: Path) -> Iterator[tuple[str, str]]:
    """Our picker in front of three simulated workers, each in a process of its own; ext_proc and health addresses."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "router", *arguments]
        environment = os.environ | {"XDG_STATE_HOME": str(home), "POINTSMAN_EPP__HOST": "127.0.0.1"}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
        return started[-1]

    try:
        workers = [start("sim-worker", "--port", "0", "--events", "tcp://127.0.0.1:0") for _ in range(3)]
        urls = [f"{told['http']},events={told['events']}" for told in map(_told, workers)]
        free = [text for name in ("grpc", "health", "http") for text in (f"--{name}-port", "0")]
        told = _told(start("epp", *free, *(text for url in urls for text in ("--worker", url))))
        yield told["grpc"], told["health"]
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture(scope="session")
def addresses(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str | None]]:
    """ext_proc and health addresses of the picker to look at."""
    endpoint = request.config.getoption("--endpoint", default=None)
    if endpoint is not None:
        yield endpoint, request.config.getoption("--health", default=None)
        return
    with _ours(tmp_path_factory.mktemp("picker")) as both:
        yield both


@pytest.fixture
async def subject(
    request: pytest.FixtureRequest, addresses: tuple[str, str | None]
) -> AsyncIterator[Subject]:
    endpoint, health = addresses
    async with picker_client(endpoint) as client:
        yield Subject(client, health, request.config.getoption("--model", default=MODEL))
