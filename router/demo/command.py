# SPDX-License-Identifier: Apache-2.0
"""The demo from start to end: round robin on a fresh fleet, KV-aware on another, the table; then serve until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop

from router.config import Config, load
from router.config_fleet import WorkerEntry
from router.demo.client import GatewayClient, Sample, drive
from router.demo.errors import DemoError
from router.demo.examples import render_examples
from router.demo.results import RunResult, summarise
from router.demo.table import render_overhead, render_saving, render_table
from router.demo.workers import MODEL, running_workers
from router.demo.workload import Workload, endless_workloads, make_workload
from router.errors import ConfigError
from router.plan.policies import PolicyName
from router.serve import running_gateway

_SEED = 7
_PORT = 8080
_PROGRESS_S = 3.0
_EXIT_OK = 0
_EXIT_FAILED = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class _Options:
    workers: int
    once: bool
    folder: Path
    """For the hash key and the workers' logs."""


def run(*, workers: int, once: bool) -> int:
    """Run the demo; returns the exit code: 0 when the table shows what it should, or when stopped after it."""
    logging.getLogger().setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="pointsman-demo-") as folder:
        try:
            return uvloop.run(_run(_Options(workers, once, Path(folder))))
        except DemoError as error:
            print(f"pointsman demo: {error}", file=sys.stderr)
            return _EXIT_FAILED


async def _run(options: _Options) -> int:
    stop = asyncio.Event()
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    main = asyncio.create_task(_demonstrate(options))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({main, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not main.done():
        _say("Stopping.")
        # The terminal has told the workers too: that they leave is no news.
        logging.disable(logging.CRITICAL)
        main.cancel()
    try:
        return await main
    except asyncio.CancelledError:
        return _EXIT_FAILED


async def _demonstrate(options: _Options) -> int:
    workload = make_workload(_SEED, options.workers)
    _say(
        f"{workload.requests} streamed requests, {len(workload.conversations)} conversations over "
        f"{len(workload.documents)} shared documents of about 10,000 tokens; {options.workers} simulated workers."
    )
    async with _gateway(options, "round_robin", 0) as (url, client):
        plain = await _measure("round_robin", url, client, workload)
    async with _gateway(options, "kv_aware", 0 if options.once else _PORT) as (url, client):
        routed = await _measure("kv_aware", url, client, workload)
        code = _report(plain, routed)
        if not options.once:
            _say(render_examples(url, MODEL, workload.documents[0]))
            with contextlib.suppress(asyncio.CancelledError):
                await _keep_busy(client, options.workers)
    return code


@contextlib.asynccontextmanager
async def _gateway(
    options: _Options, policy: PolicyName, port: int
) -> AsyncIterator[tuple[str, GatewayClient]]:
    """A gateway with that policy in front of a fresh fleet: its URL, and a client of it."""
    async with contextlib.AsyncExitStack() as stack:
        _say(f"\n{policy}: starting {options.workers} workers ...")
        workers = await stack.enter_async_context(running_workers(options.workers, options.folder))
        config = _config(options, policy, port, workers)
        try:
            _, url = await stack.enter_async_context(running_gateway(config))
        except ConfigError:
            if not port:
                raise
            _say(f"Port {port} is taken; using a free one.")
            config = _config(options, policy, 0, workers)
            _, url = await stack.enter_async_context(running_gateway(config))
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        await stack.enter_async_context(session)
        client = GatewayClient(session, url, MODEL)
        await client.wait_until_followed()
        yield url, client


def _config(options: _Options, policy: PolicyName, port: int, workers: Sequence[WorkerEntry]) -> Config:
    overrides = {
        "server.port": port,
        "plan.policy": policy,
        "index.hash_key_file": str(options.folder / "hash.key"),
    }
    # The demo shows the defaults, whatever the environment says.
    return load(environ={}, overrides=overrides, workers=workers)


async def _measure(policy: PolicyName, url: str, client: GatewayClient, workload: Workload) -> RunResult:
    _say(f"{policy}: gateway {url}  admin API {url}/admin/api/workers  metrics {url}/metrics")
    samples: list[Sample] = []
    progress = asyncio.create_task(_tell(policy, samples, workload.requests))
    try:
        await drive(client, workload, samples.append)
    finally:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)
    _say(f"{policy}: all {len(samples)} requests answered.")
    return summarise(policy, samples, await client.decisions())


async def _tell(policy: str, samples: Sequence[Sample], total: int) -> None:
    start_s = time.monotonic()
    while True:
        await asyncio.sleep(_PROGRESS_S)
        _say(
            f"{policy}: {len(samples):4d} of {total} requests answered after {time.monotonic() - start_s:.0f} s"
        )


def _report(plain: RunResult, routed: RunResult) -> int:
    """Print the table; 1 when it does not show what the demo is for."""
    _say("\n" + render_table([plain, routed]) + "\n")
    _say(render_overhead(routed))
    _say(render_saving(plain, routed))
    if routed.peer_pulls == 0:
        print("pointsman demo: no prompt was served by a peer pull", file=sys.stderr)
        return _EXIT_FAILED
    return _EXIT_OK


async def _keep_busy(client: GatewayClient, workers: int) -> None:
    """Gentle traffic until cancelled; a request that fails (of a worker that was killed, say) is told."""
    for workload in endless_workloads(_SEED, workers):
        try:
            await drive(client, workload, lambda _: None)
        except DemoError as error:
            _say(f"{error}")
            await asyncio.sleep(1.0)


def _say(text: str) -> None:
    print(text, flush=True)
