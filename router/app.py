# SPDX-License-Identifier: Apache-2.0
"""The composition root of the gateway: one configuration in, one running service out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from router.admin.api import make_admin_app
from router.brain import Brain
from router.config import Config
from router.deciding import Deciding
from router.fleet.fleet import Fleet
from router.gateway.proxy import GatewayApp
from router.gateway.settings import GatewaySettings
from router.gateway.upstream import UpstreamClient
from router.lifespan import live

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Decides(Protocol):
    """``router.brain.Brain``, or what stands for it in one process of several."""

    @property
    def deciding(self) -> Deciding: ...

    @property
    def fleet(self) -> Fleet: ...

    def synced(self) -> bool:
        """Whether every source of workers has told them at least once."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Gateway:
    """An ASGI app: ``/v1/*`` to a brain, the rest to another app.

    ``start`` and ``stop`` run once each, on the event loop that serves; the lifespan calls them.
    """

    def __init__(self, config: Config, decides: Decides, rest: AsgiApp) -> None:
        """Nothing is opened yet."""
        self.config = config
        self._decides = decides
        self._rest = rest
        self.failed: Exception | None = None
        """Why it could not start."""
        self._upstream: UpstreamClient | None = None
        self._gateway: GatewayApp | None = None

    async def start(self) -> None:
        """Open connections and learn the fleet; returns after every worker was asked once."""
        settings = GatewaySettings(
            max_body_bytes=self.config.gateway.max_body_bytes,
            connect_timeout_s=self.config.gateway.connect_timeout_s,
            idle_timeout_s=self.config.gateway.idle_timeout_s,
            retries=self.config.gateway.retries,
        )
        deciding = self._decides.deciding
        self._upstream = UpstreamClient(settings)
        self._gateway = GatewayApp(
            deciding.dispatcher, self._upstream, settings, models=deciding.models, terms=deciding.terms
        )
        await self._decides.start()

    async def stop(self) -> None:
        """Close everything that ``start`` opened."""
        await self._decides.stop()
        if self._upstream is not None:
            await self._upstream.aclose()

    def addresses(self, url: str) -> dict[str, str]:
        """What the command prints once it listens."""
        return {"url": url, "admin": f"{url}/admin/api/"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(self, receive, send)
        elif scope["type"] == "http" and scope["path"].startswith("/v1/") and self._gateway is not None:
            await self._gateway(scope, receive, send)
        else:
            await self._rest(scope, receive, send)


class PointsmanApp(Gateway):
    """The whole service in one process."""

    def __init__(self, config: Config) -> None:
        """Build everything; nothing is opened yet.

        Raises:
            ConfigError: a value that only its user can judge (profile, tokenizer, key file).
        """
        self.brain = Brain(config)
        super().__init__(config, self.brain, admin_app(config, self.brain))


def admin_app(config: Config, brain: Brain) -> AsgiApp:
    """Everything but ``/v1`` of one process."""
    return make_admin_app(
        brain.views(),
        config.admin.token,
        enabled=config.admin.enabled,
        report_token=config.admin.report_token,
    )
