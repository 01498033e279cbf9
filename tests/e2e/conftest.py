# SPDX-License-Identifier: Apache-2.0
"""Workers that a test starts and that are stopped with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from recorder import Recorder


@pytest.fixture
async def recorder() -> AsyncIterator[Callable[[], Awaitable[Recorder]]]:
    runners: list[web.AppRunner] = []

    async def start() -> Recorder:
        one = Recorder()
        app = web.Application(client_max_size=2**27)
        for path in ("/health", "/metrics", "/v1/models"):
            app.router.add_get(path, one.look)
        app.router.add_post("/tokenize", one.look)
        app.router.add_post("/v1/{rest:.*}", one.infer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return one

    yield start
    for runner in runners:
        await runner.cleanup()
