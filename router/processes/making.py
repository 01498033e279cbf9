# SPDX-License-Identifier: Apache-2.0
"""The composition roots of the processes: what the keeper and a serving process are made of."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from router.app import Gateway
from router.brain import Brain
from router.build import hash_key, limits
from router.config import Config
from router.decisions.lines import file_of_process
from router.extproc.app import ExtProcApp
from router.extproc.metrics import PoolCollector
from router.fleet.phases import CAN_ANSWER
from router.fleet.worker import Health
from router.plan.native_board import NativeLoadBoard
from router.processes.following import FollowingBrain
from router.processes.keeper import Keeper
from router.processes.link import KeeperLink
from router.processes.pass_on import PassOn
from router.processes.shared_index import open_shared_index, write_shared_index
from router.processes.start import ADMIN, BOARD, FEED, Service, Start
from router.processes.told import Telling


def keeper_app(start: Start, config: Config) -> Keeper:
    """The keeper.

    Raises:
        ConfigError: a value that only its user can judge.
    """
    decisions = replace(config.decisions, log=replace(config.decisions.log, path=None))
    config = replace(config, decisions=decisions)
    index, told = write_shared_index(
        hash_key(config), limits(config), Path(start.directory), start.generation
    )
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
    log = config.decisions.log
    if log.path is not None:
        path = str(file_of_process(Path(log.path), start.process or 0))
        config = replace(config, decisions=replace(config.decisions, log=replace(log, path=path)))
    brain = FollowingBrain(config, link, _board(start), open_shared_index, first)

    def ready() -> dict[str, Any]:
        statuses = brain.fleet.statuses()
        healthy = [one.spec.id for one in statuses if one.health is Health.HEALTHY]
        return {
            "ready": any(one.health is Health.HEALTHY and one.spec.role in CAN_ANSWER for one in statuses),
            "healthy_workers": healthy,
            "degraded": {"keeper": ["it is being started again"]},
        }

    rest = PassOn(
        Path(start.directory) / ADMIN, lambda: link.is_connected, ready, config.gateway.max_body_bytes
    )
    if start.service is Service.PICKER:
        return ExtProcApp(config, brain, rest, shares_ports=True)
    return Gateway(config, brain, rest)


def _board(start: Start) -> NativeLoadBoard:
    return NativeLoadBoard(Path(start.directory) / BOARD)
