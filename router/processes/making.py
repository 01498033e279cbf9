# SPDX-License-Identifier: Apache-2.0
"""The composition roots of the processes: what the keeper and a serving process are made of."""

from __future__ import annotations

import math
import socket
from pathlib import Path

from msgspec.structs import replace

from router.app import Gateway
from router.brain import Brain
from router.build import hash_key, limits
from router.config import Config
from router.decisions.lines import file_of_process
from router.extproc.app import ExtProcApp
from router.extproc.metrics import PoolCollector
from router.extproc.server import bind_port
from router.plan.native_board import NativeLoadBoard
from router.processes.following import FollowingBrain
from router.processes.keeper import Keeper
from router.processes.link import KeeperLink
from router.processes.pass_on import PassOn
from router.processes.shared_index import ReadsIndex, write_shared_index
from router.processes.start import ADMIN, BOARD, FEED, GRPC_PORTS, TENANTS, Service, Start
from router.processes.tenant_counts import TenantCounts, tenant_names
from router.processes.told import Telling


def keeper_app(start: Start, config: Config) -> Keeper:
    """The keeper.

    Raises:
        ConfigError: a value that only its user can judge.
    """
    decisions = replace(config.decisions, log=replace(config.decisions.log, path=None))
    config = replace(config, decisions=decisions)
    directory = Path(start.directory)
    index, told = write_shared_index(hash_key(config), limits(config, directory), directory, start.generation)
    brain = Brain(config, _board(start), index)
    if start.service is Service.PICKER:
        brain.dispatcher.behind_proxy = True
        brain.metrics.registry.register(PoolCollector(brain.fleet, config.epp.pool))
    return Keeper(config, brain, told, socket.socket(fileno=start.listeners[FEED]))


def serving_app(start: Start, config: Config, link: KeeperLink, first: Telling) -> Gateway | ExtProcApp:
    """A process that serves.

    Raises:
        ConfigError: a value that only its user can judge.
    """
    process = start.process or 0
    config = share_of(config, process, start.processes)
    in_flight = TenantCounts(Path(start.directory) / TENANTS, tenant_names(config.tenants), process)
    rest = PassOn(Path(start.directory) / ADMIN, config.gateway.max_body_bytes, process)
    brain = FollowingBrain(config, link, _board(start), in_flight, ReadsIndex(hash_key(config)), first, rest)

    if start.service is Service.PICKER:
        bound: dict[str, socket.socket] = {
            name: bind_port(config.epp, name, shares_port=True) for name in GRPC_PORTS
        }
        return ExtProcApp(config, brain, rest, bound)
    return Gateway(config, brain, rest)


def share_of(config: Config, process: int, processes: int) -> Config:
    """The configuration of one serving process: a file of its own, and its part of what all may keep together."""
    log = config.decisions.log
    if log.path is not None:
        log = replace(log, path=str(file_of_process(Path(log.path), process)))
    capacity = math.ceil(config.decisions.capacity / processes)
    waiting = math.ceil(config.admission.max_waiting / processes)
    return replace(
        config,
        decisions=replace(config.decisions, log=log, capacity=capacity),
        admission=replace(config.admission, max_waiting=waiting),
    )


def _board(start: Start) -> NativeLoadBoard:
    return NativeLoadBoard(Path(start.directory) / BOARD)
