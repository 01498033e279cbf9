# SPDX-License-Identifier: Apache-2.0
"""The demo's fleet: ``pointsman sim-worker`` processes, so that measured times are the engines' and not one event loop's."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from router.config_fleet import WorkerEntry
from router.demo.errors import DemoError

BLOCK_SIZE_TOKENS = 16
HBM_BLOCKS = 3072
"""About four documents: placement matters."""
RAM_BLOCKS = 6144
"""About nine documents: too few for all of them on every worker."""
MODEL = "sim-model"

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_LOG_TAIL_CHARS = 2000
_EPHEMERAL = "tcp://127.0.0.1:0"


class _Addresses(msgspec.Struct, frozen=True):
    """The line that a worker prints when it listens."""

    http: str
    events: str
    replay: str
    p2p: str


@contextlib.asynccontextmanager
async def running_workers(count: int, folder: Path) -> AsyncIterator[list[WorkerEntry]]:
    """``count`` fresh workers within a block; they are ended with it. Their logs go to ``folder``.

    Raises:
        DemoError: one of them did not start.
    """
    async with contextlib.AsyncExitStack() as stack:
        processes: list[Process] = []
        stack.push_async_callback(_stop, processes)
        logs = [folder / f"sim-{number}.log" for number in range(count)]
        for log in logs:
            with log.open("wb") as stderr:
                processes.append(
                    await asyncio.create_subprocess_exec(*_command(), stdout=PIPE, stderr=stderr)
                )
        addresses = await asyncio.gather(*map(_addresses, processes, logs))
        yield [
            WorkerEntry(url=one.http, id=f"sim-{number}", events=one.events, replay=one.replay, p2p=one.p2p)
            for number, one in enumerate(addresses)
        ]


def _command() -> list[str]:
    options = {
        "--port": "0",
        "--events": _EPHEMERAL,
        "--replay": _EPHEMERAL,
        "--p2p-port": "0",
        "--model": MODEL,
        "--block-size": str(BLOCK_SIZE_TOKENS),
        "--hbm-blocks": str(HBM_BLOCKS),
        "--ram-blocks": str(RAM_BLOCKS),
    }
    # -P: in a source checkout the current directory holds packages of our names without their native parts.
    command = [sys.executable, "-P", "-m", "router", "sim-worker"]
    return command + [word for option in options.items() for word in option]


async def _addresses(process: Process, log: Path) -> _Addresses:
    if process.stdout is None:
        raise DemoError("a simulated worker has no output to read")
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            line = await process.stdout.readline()
    except TimeoutError:
        raise DemoError(f"a simulated worker did not start within {_START_TIMEOUT_S:.0f} s") from None
    try:
        return msgspec.json.decode(line, type=_Addresses)
    except msgspec.DecodeError:
        raise DemoError(f"a simulated worker did not start:\n{_tail(log)}") from None


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_LOG_TAIL_CHARS:]


async def _stop(processes: list[Process]) -> None:
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
    await asyncio.gather(*map(_ended, processes))


async def _ended(process: Process) -> None:
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
