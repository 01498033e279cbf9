# SPDX-License-Identifier: Apache-2.0
"""The ASGI lifespan of an app that is started and stopped once."""

from __future__ import annotations

from typing import Protocol

from router.gateway.asgi import Receive, Send


class Lives(Protocol):
    """What the lifespan starts and stops."""

    failed: Exception | None
    """Why it could not be started; the server only tells that it was not."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


async def live(app: Lives, receive: Receive, send: Send) -> None:
    """Answer the messages of a ``lifespan`` scope."""
    await receive()
    try:
        await app.start()
    except Exception as error:
        app.failed = error
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        return
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await app.stop()
    await send({"type": "lifespan.shutdown.complete"})
