# SPDX-License-Identifier: Apache-2.0
"""What the router knows of the workers of a virtual fleet: what its polls and its event streams tell it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from engine_ext.sim.config import SimConfig
from indexer.holders import HolderTable
from indexer.identity import WorkerId
from router.fleet.worker import Health, WorkerSpec, WorkerStatus
from router.plan.load import LoadBoard

POLL_INTERVAL_S = 1.0
"""Default of ``fleet.poll_interval_s``."""

_PEER_PORT = 1


def next_poll_s(now_s: float) -> float:
    """When the router next looks at its workers."""
    return (math.floor(now_s / POLL_INTERVAL_S) + 1) * POLL_INTERVAL_S


class PolledWorkers:
    """The statuses of all workers; a worker's name is its host name."""

    def __init__(
        self, names: Sequence[str], engine: SimConfig, holders: HolderTable, board: LoadBoard, model: str
    ) -> None:
        self._holders = holders
        self._board = board
        self._statuses = {name: _status(name, engine) for name in names}
        for name in names:
            holders.register(WorkerId(name), model, 1)

    def all(self) -> list[WorkerStatus]:
        """Every worker: any may be a source."""
        return list(self._statuses.values())

    def candidates(self, tried: Collection[str]) -> list[WorkerStatus]:
        """Those that may be sent a request."""
        return [
            status
            for name, status in self._statuses.items()
            if status.health is Health.HEALTHY and name not in tried
        ]

    def polled(self, worker: str, *, answers: bool) -> None:
        """A poll has ended."""
        status = self._statuses[worker]
        if status.answering and not answers:
            self._lost(worker)
        status.answering = answers
        status.health = Health.HEALTHY if answers else Health.UNHEALTHY

    def restarted(self, worker: str) -> None:
        """A new process publishes events; where no poll saw the old one gone, they tell."""
        if self._statuses[worker].answering:
            self._lost(worker)

    def _lost(self, worker: str) -> None:
        """What its process held is gone; the store of its disk stays."""
        self._holders.new_incarnation(WorkerId(worker), "its process is gone")
        self._board.forget(worker)


def _status(name: str, engine: SimConfig) -> WorkerStatus:
    p2p = f"{name}:{_PEER_PORT}" if engine.offloads else None
    return WorkerStatus(
        WorkerSpec(name, f"http://{name}", p2p=p2p, extension=p2p if engine.extension else None),
        health=Health.HEALTHY,
        answering=True,
        block_size_tokens=engine.block_size_tokens,
        hbm_blocks=engine.hbm_blocks,
    )
