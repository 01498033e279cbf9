# SPDX-License-Identifier: Apache-2.0
"""What the supervisor holds for all processes: listening sockets, ports, a directory. Closed by itself at the end."""

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
from router.processes.start import ADMIN, FEED, HTTP, Service
from router.serve import listen

_BACKLOG = 4096
_LONGEST_PATH = 100  # of a Unix socket: 108 bytes in all


class SharedPlaces:
    """Made and closed by ``open_places``."""

    def __init__(self, directory: Path, http: socket.socket, keeper: dict[str, socket.socket]) -> None:
        self.directory = directory
        self._http = http
        self._keeper = keeper

    def descriptors_for(self, *, serving: bool) -> dict[str, int]:
        """Of the listeners that a process takes connections from."""
        sockets = {HTTP: self._http} if serving else self._keeper
        return {name: one.fileno() for name, one in sockets.items()}


@contextlib.contextmanager
def open_places(service: Service, config: Config) -> Iterator[tuple[Config, SharedPlaces]]:
    """The places, and the configuration with the ports that are held.

    Raises:
        ConfigError: a port is taken, or the directory cannot be made.
    """
    with contextlib.ExitStack() as stack:
        http = stack.enter_context(contextlib.closing(listen(config)))
        config = replace(config, server=replace(config.server, port=http.getsockname()[1]))
        if service is Service.PICKER:
            grpc = stack.enter_context(_held_port(config, "grpc_port"))
            health = stack.enter_context(_held_port(config, "health_port"))
            config = replace(
                config,
                epp=replace(config.epp, grpc_port=grpc, health_port=health, http_port=config.server.port),
            )
        directory = stack.enter_context(_directory(config))
        keeper = {
            name: stack.enter_context(contextlib.closing(_unix_listener(directory / name)))
            for name in (FEED, ADMIN)
        }
        yield config, SharedPlaces(directory, http, keeper)


@contextlib.contextmanager
def _held_port(config: Config, name: str) -> Iterator[int]:
    """A port that processes may share, kept from others; nothing is heard there until a process listens."""
    host, port = config.epp.host, getattr(config.epp, name)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            with socket.socket(family, socket.SOCK_STREAM) as alone:
                # Who shares its port with anybody would share it with us.
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((host, port))
                alone.listen(1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
        yield held.getsockname()[1]
    except OSError as error:
        accepted = f"a port that is free on {host} ({error.strerror})"
        raise ConfigError(f"epp.{name}", port, accepted) from error
    finally:
        held.close()


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
