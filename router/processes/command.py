# SPDX-License-Identifier: Apache-2.0
"""``--processes N``: several processes that serve as one."""

from __future__ import annotations

import asyncio

from router.config import Config
from router.errors import ConfigError
from router.extproc.app import with_http_port
from router.extproc.endpoints import check_endpoints
from router.processes.shared_places import open_places
from router.processes.start import Service
from router.processes.supervisor import Supervisor


def supervise(service: Service, config: Config) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit code. Prints one JSON line when all processes serve.

    Raises:
        ConfigError: an address cannot be bound, or several processes cannot serve with this configuration.
    """
    check_native(config)
    if service is Service.PICKER:
        check_endpoints(config.fleet.workers)
        config = with_http_port(config)
    with open_places(service, config) as (held, places):
        return asyncio.run(Supervisor(service, held, places).run())


def check_native(config: Config) -> None:
    """Several processes share the index and the load board of the native core.

    Raises:
        ConfigError: another implementation is configured.
    """
    for field, value in (("plan.backend", config.plan.backend), ("index.backend", config.index.backend)):
        if value != "native":
            raise ConfigError(field, value, "native, where several processes serve (server.processes)")
