# SPDX-License-Identifier: Apache-2.0
"""What the supervisor holds for all processes: ports, the keeper's sockets, a directory.

A port is held by a socket that shares it and never listens, so that it stays ours while processes come and go.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from router.config import Config
from router.errors import ConfigError
from router.extproc.server import bind_port
from router.processes.start import ADMIN, FEED, GRPC_PORTS, TENANTS, Service
from router.processes.tenant_counts import TenantTable, tenant_names
from router.serve import listen

_BACKLOG = 4096
_LONGEST_PATH = 100  # of a Unix socket: 108 bytes in all


class SharedPlaces:
    """Made and closed by ``open_places``."""

    def __init__(
        self,
        directory: Path,
        keeper: dict[str, socket.socket],
        tenants: TenantTable,
    ) -> None:
        self.directory = directory
        self._keeper = keeper
        self._tenants = tenants

    def keeper_listeners(self) -> dict[str, int]:
        """Descriptors of the sockets that the keeper takes connections from, by name."""
        return {name: one.fileno() for name, one in self._keeper.items()}

    def died(self, process: int) -> None:
        """A serving process has nothing in flight any more."""
        self._tenants.clear(process)


@contextlib.contextmanager
def open_places(service: Service, config: Config) -> Iterator[tuple[Config, SharedPlaces]]:
    """The places, and the configuration with the ports that are held.

    Raises:
        ConfigError: a port is taken, or the directory cannot be made.
    """
    with contextlib.ExitStack() as stack:
        # Each port is tried alone first: who shares its port would share it with strangers too.
        with listen(config) as alone:
            config = replace(config, server=replace(config.server, port=_port(alone)))
        stack.enter_context(listen(config, shares_port=True))
        for name in GRPC_PORTS if service is Service.PICKER else ():
            with bind_port(config.epp, name) as alone:
                config = replace(config, epp=replace(config.epp, **{name: _port(alone)}))
            stack.enter_context(bind_port(config.epp, name, shares_port=True))
        directory = stack.enter_context(_directory(config))
        keeper = {name: stack.enter_context(_unix_listener(directory / name)) for name in (FEED, ADMIN)}
        tenants = TenantTable(directory / TENANTS, len(tenant_names(config.tenants)), config.server.processes)
        stack.callback(tenants.close)
        yield config, SharedPlaces(directory, keeper, tenants)


def _port(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def _directory(config: Config) -> Iterator[Path]:
    given = config.server.shared_dir
    try:
        if given is not None:
            Path(given).mkdir(mode=0o700, parents=True, exist_ok=True)
        parent = given or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        made = Path(tempfile.mkdtemp(prefix="pointsman-", dir=parent if Path(parent).is_dir() else None))
    except OSError as error:
        accepted = f"a directory that files can be made in ({error.strerror})"
        raise ConfigError("server.shared_dir", given, accepted) from error
    try:
        if len(os.fsencode(made / ADMIN)) > _LONGEST_PATH:
            raise ConfigError(
                "server.shared_dir", given, "a shorter path: that of a socket has 107 bytes at most"
            )
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _unix_listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    return listener
