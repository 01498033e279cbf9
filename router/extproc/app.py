# SPDX-License-Identifier: Apache-2.0
"""The composition root of the endpoint picker: the brain behind an ext_proc server, metrics and admin over HTTP."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from msgspec.structs import replace

from router.app import AsgiApp, Decides, Receive, Scope, Send, admin_app
from router.brain import Brain
from router.config import Config
from router.extproc.endpoints import Endpoints, check_endpoints
from router.extproc.messages import BodyMode, Modes
from router.extproc.metrics import PickerMetrics, PoolCollector
from router.extproc.picker import Picker, PickerSettings
from router.extproc.prefills import PrefillSender
from router.extproc.server import PickerServers
from router.extproc.service import ExternalProcessor
from router.extproc.stream import StreamSettings
from router.gateway.settings import GatewaySettings
from router.lifespan import live


class ExtProcApp:
    """An ASGI app for the HTTP port of a picker; the gRPC ports are opened and closed by the lifespan."""

    def __init__(
        self,
        config: Config,
        decides: Decides,
        rest: AsgiApp,
        bound: Mapping[str, socket.socket] | None = None,
    ) -> None:
        """Nothing is opened yet. ``bound``: sockets of the gRPC ports, as ``PickerServers`` takes them.

        Raises:
            ConfigError: certificates that cannot be read.
        """
        self.config = with_http_port(config)
        self._decides = decides
        self._rest = rest
        self.failed: Exception | None = None
        """Why it could not start."""
        epp, deciding = config.epp, decides.deciding
        deciding.dispatcher.behind_proxy = True
        picker = Picker(
            deciding.dispatcher,
            Endpoints(decides.fleet.statuses),
            deciding.terms,
            PickerSettings(epp.fallbacks, epp.scores, epp.gateway_tests),
        )
        self._prefills = PrefillSender(_leg_settings(config))
        self.processor = ExternalProcessor(
            picker,
            _stream_settings(config),
            PickerMetrics(deciding.metrics.registry),
            time.monotonic,
            self._prefills,
        )
        self.servers = PickerServers(
            epp, config.gateway.max_body_bytes, self.processor, decides.synced, bound
        )

    async def start(self) -> None:
        """Open everything; streams are taken after every worker was asked once.

        Raises:
            ConfigError: a port is taken.
        """
        try:
            await self.servers.open_health()
            await self._prefills.open()
            await self._decides.start()
            await self.servers.open()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Drain, then close everything that ``start`` opened."""
        await self.servers.close()
        await self._prefills.close()
        await self._decides.stop()

    def addresses(self, url: str) -> dict[str, str]:
        """What the command prints once it listens."""
        host = self.config.epp.host
        shown = f"[{host}]" if ":" in host else host
        return {
            "url": url,
            "admin": f"{url}/admin/api/",
            "grpc": f"{shown}:{self.servers.grpc_port}",
            "health": f"{shown}:{self.servers.health_port}",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(self, receive, send)
        else:
            await self._rest(scope, receive, send)


class PickerApp(ExtProcApp):
    """The whole picker in one process."""

    def __init__(self, config: Config) -> None:
        """Build everything; nothing is opened yet.

        Raises:
            ConfigError: a value that only its user can judge, or a worker that no proxy can be sent to.
        """
        check_endpoints(config.fleet.workers)
        config = with_http_port(config)
        self.brain = Brain(config, check_workers=check_endpoints)
        self.brain.metrics.registry.register(PoolCollector(self.brain.fleet, config.epp.pool))
        super().__init__(config, self.brain, admin_app(config, self.brain))


def with_http_port(config: Config) -> Config:
    """The HTTP server of a picker listens on a port of its own."""
    return replace(config, server=replace(config.server, port=config.epp.http_port))


def _leg_settings(config: Config) -> GatewaySettings:
    return GatewaySettings(connect_timeout_s=config.gateway.connect_timeout_s)


def _stream_settings(config: Config) -> StreamSettings:
    epp = config.epp
    return StreamSettings(
        max_body_bytes=config.gateway.max_body_bytes,
        max_inspected_bytes=GatewaySettings().max_inspected_bytes,
        modes=Modes(BodyMode(epp.request_body_mode), BodyMode(epp.response_body_mode)),
        tells_served=epp.gateway_tests,
    )
