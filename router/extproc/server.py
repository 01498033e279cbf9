# SPDX-License-Identifier: Apache-2.0
"""The gRPC servers of the picker: ext_proc on one port, health on another; an orderly end of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc_health.v1 import health_pb2_grpc

from router.config_epp import EppConfig
from router.errors import ConfigError
from router.extproc.health import HealthService
from router.extproc.service import ExternalProcessor
from router.extproc.tls import server_credentials

_ROOM_BYTES = 1024 * 1024  # headers and metadata beside a buffered body
_KEEPALIVE_MS = 30_000  # a proxy whose host has gone silently is noticed within a minute


class PickerServers:
    """Both servers. ``open_health``, ``open``, ``close``: once each, in this order, on one event loop."""

    def __init__(
        self,
        config: EppConfig,
        max_body_bytes: int,
        processor: ExternalProcessor,
        is_synced: Callable[[], bool] = lambda: True,
        *,
        shares_ports: bool = False,
    ) -> None:
        """Nothing listens yet. Not ready while ``is_synced`` says that the workers were never told.

        ``shares_ports``: other processes listen on the same ports, and the kernel gives each connection to one of them.

        Raises:
            ConfigError: certificates that cannot be read.
        """
        self._config = config
        self._processor = processor
        self._max_message_bytes = max_body_bytes + _ROOM_BYTES
        self._credentials = server_credentials(config.tls)
        self._reuseport = ("grpc.so_reuseport", int(shares_ports))
        self._health: Any = None
        self._server: Any = None
        self._ready = False
        self._is_synced = is_synced
        self.grpc_port = 0
        """The port in use; 0 until it is open."""
        self.health_port = 0

    async def open_health(self) -> None:
        """Answer health checks: alive, not ready."""
        self._health = grpc.aio.server(options=[self._reuseport])
        self._add_health(self._health)
        self.health_port = self._bind(self._health, "health_port", None)
        await self._health.start()

    async def open(self) -> None:
        """Take streams, and be ready."""
        self._server = grpc.aio.server(options=self._options())
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(self._processor, self._server)
        self._add_health(self._server)
        self.grpc_port = self._bind(self._server, "grpc_port", self._credentials)
        await self._server.start()
        self._ready = True

    async def close(self) -> None:
        """Unready at once, then no new streams, then the end of those that last too long."""
        self._ready = False
        if self._server is not None:
            if self._config.drain_delay_s:
                await asyncio.sleep(self._config.drain_delay_s)
            self._processor.draining = True
            await self._server.stop(self._config.drain_timeout_s)
        if self._health is not None:
            await self._health.stop(0)

    def _add_health(self, server: Any) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(
            HealthService(lambda: self._ready and self._is_synced()), server
        )

    def _options(self) -> list[tuple[str, int]]:
        return [
            self._reuseport,
            ("grpc.max_receive_message_length", self._max_message_bytes),
            ("grpc.max_send_message_length", self._max_message_bytes),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
        ]

    def _bind(self, server: Any, name: str, credentials: Any | None) -> int:
        host, port = self._config.host, getattr(self._config, name)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound: int = (
                server.add_insecure_port(address)
                if credentials is None
                else server.add_secure_port(address, credentials)
            )
        except RuntimeError:
            bound = 0
        if not bound:
            raise ConfigError(f"epp.{name}", port, f"a port that is free on {host}")
        return bound
