# SPDX-License-Identifier: Apache-2.0
"""Who a call came from, where another process passes it on over a socket that only our processes can open."""

from __future__ import annotations

from router.app import AsgiApp, Receive, Scope, Send

HEADER = b"x-pointsman-client"


class KnowsClients:
    """An ASGI app that sees the address of the first hop's client in place of the process that passed the call on."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value for name, value in scope["headers"] if name == HEADER]
            headers = [pair for pair in scope["headers"] if pair[0] != HEADER]
            client = (hosts[0].decode("latin-1"), 0) if hosts else None
            scope = {**scope, "headers": headers, "client": client}
        await self._app(scope, receive, send)
