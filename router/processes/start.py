# SPDX-License-Identifier: Apache-2.0
"""What the supervisor tells a process when it starts it, and what the process tells back. Values only."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from router.extproc.server import PortName


class Service(enum.Enum):
    """What the processes serve together."""

    GATEWAY = "gateway"
    PICKER = "picker"


class Start(msgspec.Struct, tag="start", frozen=True):
    """The first message to a process, and the only one to those that serve."""

    service: Service
    process: int | None
    """The number of a serving process; None for the keeper."""
    processes: int
    """How many serve."""
    config: dict[str, Any]
    """As plain values."""
    directory: str
    """Where sockets and shared memory are."""
    listeners: dict[str, int]
    """Descriptors of the keeper's listening sockets by name."""
    generation: int
    """How often the process was started, this time included."""


class ProcessState(msgspec.Struct, frozen=True):
    """One of the processes, as the supervisor knows it."""

    name: str
    pid: int | None
    """None while it is dead."""
    restarts: int
    hangs: int = 0
    """How often it was killed because it did not answer; those are among the restarts."""


class States(msgspec.Struct, tag="states", frozen=True):
    """To the keeper: all of the processes, whenever one has changed."""

    processes: list[ProcessState]


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """To a process: does its loop turn?"""

    number: int


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """From a process: it does."""

    number: int


class Up(msgspec.Struct, tag="up", frozen=True):
    """From a process: it serves."""

    addresses: dict[str, str]


FromSupervisor = Start | States | Ping
FromChild = Up | Pong

FEED = "feed.sock"
"""Where the keeper hears and tells serving processes; also the name of its listener."""
ADMIN = "admin.sock"
"""Where it answers HTTP of the admin API."""
BOARD = "board"
TENANTS = "tenants"
"""Where requests in flight are counted by tenant."""
GRPC_PORTS: tuple[PortName, ...] = ("grpc_port", "health_port")
"""Ports of the picker that processes share; the names are those of the configuration."""
