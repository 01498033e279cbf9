# SPDX-License-Identifier: Apache-2.0
"""The gRPC servers of the picker: ext_proc on one port, health on another; an orderly end of both."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Literal

from router.config_epp import EppConfig
from router.errors import ConfigError
from router.extproc.health import HealthService
from router.extproc.http2.server import GrpcServer
from router.extproc.names import PROCESS_METHOD
from router.extproc.service import ExternalProcessor
from router.extproc.tls import server_tls

PortName = Literal["grpc_port", "health_port"]

_ROOM_BYTES = 1024 * 1024  # headers and metadata beside a buffered body
_HEALTH_MESSAGE_BYTES = 4096


class PickerServers:
    """Both servers. ``open_health``, ``open``, ``close``: once each, in this order, on one event loop."""

    def __init__(
        self,
        config: EppConfig,
        max_body_bytes: int,
        processor: ExternalProcessor,
        is_synced: Callable[[], bool] = lambda: True,
        bound: Mapping[str, socket.socket] | None = None,
    ) -> None:
        """Nothing listens yet. Not ready while ``is_synced`` says that the workers were never told.

        ``bound``: sockets for ``grpc_port`` and ``health_port``, where other processes listen on them too.

        Raises:
            ConfigError: certificates that cannot be read.
        """
        self._config = config
        self._processor = processor
        self._tls = server_tls(config.tls)
        self._bound = bound or {}
        self._ready = False
        health = HealthService(lambda: self._ready and is_synced()).methods()
        self._health = GrpcServer(health, _HEALTH_MESSAGE_BYTES)
        self._server = GrpcServer(
            {PROCESS_METHOD: processor.exchange, **health}, max_body_bytes + _ROOM_BYTES
        )
        self.grpc_port = 0
        """The port in use; 0 until it is open."""
        self.health_port = 0

    async def open_health(self) -> None:
        """Answer health checks: alive, not ready."""
        listener = self._bind("health_port")
        self.health_port = listener.getsockname()[1]
        await self._health.open(listener)

    async def open(self) -> None:
        """Take streams, and be ready."""
        listener = self._bind("grpc_port")
        self.grpc_port = listener.getsockname()[1]
        await self._server.open(listener, self._tls)
        self._ready = True

    async def close(self) -> None:
        """Unready at once, then no new streams, then the end of those that last too long."""
        self._ready = False
        if self.grpc_port:
            if self._config.drain_delay_s:
                await asyncio.sleep(self._config.drain_delay_s)
            self._processor.draining = True
            await self._server.close(self._config.drain_timeout_s)
        await self._health.close(0)

    def _bind(self, name: PortName) -> socket.socket:
        return self._bound.get(name) or bind_port(self._config, name)


def bind_port(config: EppConfig, name: PortName, *, shares_port: bool = False) -> socket.socket:
    """A socket that is bound to a configured port, and does not listen yet. ``shares_port`` as in ``router.serve``.

    Raises:
        ConfigError: it is taken.
    """
    host, port = config.host, getattr(config, name)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, since asyncio turns Nagle's algorithm off only where the protocol is.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares_port))
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        accepted = f"a port that is free on {host} ({error.strerror})"
        raise ConfigError(f"epp.{name}", port, accepted) from error
    return listener
