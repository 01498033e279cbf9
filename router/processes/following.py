# SPDX-License-Identifier: Apache-2.0
"""The brain of a process that serves: decides by itself, over what the keeper tells.

Implements ``router.app.Decides``. It is made when the keeper has told all it knows for the first time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from router.build import hash_key, profile
from router.config import Config
from router.deciding import Deciding, Known
from router.fleet.fleet import Fleet, FleetCallbacks
from router.fleet.phases import CAN_ANSWER
from router.fleet.worker import Health
from router.in_flight import InFlight
from router.metrics import RouterMetrics
from router.plan.native_board import NativeLoadBoard
from router.processes.answers import answers_of
from router.processes.followed_costs import FollowedCalibration
from router.processes.followed_fleet import FollowedFleet
from router.processes.followed_holders import FollowedHolders, OpensIndex
from router.processes.followed_maps import FollowedMaps
from router.processes.followed_trust import FollowedTrust
from router.processes.link import KeeperLink
from router.processes.metric_sums import MetricChanges, reaped_promises
from router.processes.pass_on import PassOn
from router.processes.seen import BlocksMadeSeen
from router.processes.told import (
    FLEET_COSTS,
    GENERAL,
    HOLDERS,
    INDEX,
    LINK_COSTS,
    TRUST,
    WORKER,
    WORKER_COSTS,
    Entry,
    GeneralTold,
    HoldersTold,
    IndexTold,
    Key,
    ScalesTold,
    Telling,
    TrustTold,
    WorkerTold,
)
from router.silence import BlockMakers

_log = logging.getLogger(__name__)
_REAP_S = 1.0
_ORDER = {INDEX: 0, WORKER: 1}
_T = TypeVar("_T")


class TellsBlocks(BlockMakers):
    """Who has answered without events is the keeper's to judge: it hears the events."""

    def __init__(self, tell: Callable[[BlocksMadeSeen], object]) -> None:
        super().__init__()
        self._tell = tell

    def made(self, worker: str, sent_at_s: float) -> None:
        self._tell(BlocksMadeSeen(worker, sent_at_s))


class FollowingBrain:
    """One of several. ``start`` and ``stop`` run once each, on the event loop that serves."""

    def __init__(
        self,
        config: Config,
        link: KeeperLink,
        board: NativeLoadBoard,
        in_flight: InFlight,
        open_index: OpensIndex,
        first: Telling,
        rest: PassOn,
    ) -> None:
        """``first``: the first that the keeper told, which has everything. ``rest``: what is not for this process.

        Raises:
            ConfigError: a value that only its user can judge.
            OSError: the index cannot be opened.
        """
        self._link = link
        self._board = board
        self._keys: set[Key] = set()
        self._general = GeneralTold(synced=False, objectives={})
        self._profile = profile(config)
        self._calibration = (
            FollowedCalibration(self._profile, link.tell, time.monotonic) if config.costs.calibrate else None
        )
        self._trust = FollowedTrust(link.tell)
        callbacks = FleetCallbacks(on_joined=self._on_joined, on_removed=self._on_removed)
        self._fleet = FollowedFleet(config.fleet, link.tell, time.monotonic, callbacks)
        self._holders = FollowedHolders(open_index, _told_index(first))
        self._maps = FollowedMaps(link.tell)
        self.deciding = Deciding(
            config,
            Known(
                self._profile,
                hash_key(config),
                self._fleet,
                self._holders,
                board,
                self._calibration,
                self._trust,
                self._priority_of,
            ),
            RouterMetrics(),
            self._maps,
            block_makers=TellsBlocks(link.tell),
            in_flight=in_flight,
        )
        self._reaped = reaped_promises(self.deciding.metrics.registry)
        self._reaping: asyncio.Task[None] | None = None
        self._first = first
        self._rest = rest
        rest.is_keeper_there = lambda: link.is_connected
        rest.ready_without = self._ready

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    def synced(self) -> bool:
        """Whether every source of workers has told them at least once."""
        return self._general.synced

    async def start(self) -> None:
        """Take in what the keeper tells, from the first on."""
        await self.deciding.start()
        self.told(self._first)
        self._link.follow(self, answers_of(self.deciding), MetricChanges(self.deciding.metrics.registry))
        self._reaping = asyncio.create_task(self._reap(), name="reap promises of dead processes")

    async def stop(self) -> None:
        """Tell the keeper what is left to tell; whoever serves has ended before."""
        if self._reaping is not None:
            self._reaping.cancel()
            await asyncio.gather(self._reaping, return_exceptions=True)
        await self.deciding.stop()
        await self._rest.close()
        await self._link.stop()
        self._board.close(time.monotonic())

    def _ready(self) -> dict[str, Any]:
        """As ``AdminViews.ready``, by what this process knows."""
        statuses = self._fleet.statuses()
        return {
            "ready": any(one.health is Health.HEALTHY and one.spec.role in CAN_ANSWER for one in statuses),
            "healthy_workers": [one.spec.id for one in statuses if one.health is Health.HEALTHY],
            "degraded": {"keeper": ["it is being started again"]},
        }

    # What the keeper tells

    def connected(self) -> None:
        self._fleet.forget_pending()

    def told(self, telling: Telling) -> None:
        """States have changed. What cannot be taken in is logged and left as it was."""
        self._fleet.taken(telling.taken)
        for entry in sorted(telling.entries, key=lambda one: _ORDER.get(one.key[0], 2)):
            self._take(entry)
        if telling.whole:
            told = {entry.key for entry in telling.entries}
            for key in self._keys - told:
                self._take(Entry(key, None))

    def _take(self, entry: Entry) -> None:
        try:
            self._put(entry.key, entry.value)
        except Exception:
            _log.exception("what the keeper told of %s could not be taken in", entry.key)
            return
        if entry.value is None:
            self._keys.discard(entry.key)
        else:
            self._keys.add(entry.key)

    def _put(self, key: Key, value: bytes | None) -> None:
        match key:
            case (str(kind), name) if kind == WORKER:
                self._put_worker(name, _read(value, WorkerTold))
            case (str(kind), name) if kind == HOLDERS:
                self._holders.put(name, _read(value, HoldersTold))
            case (str(kind), name) if kind == TRUST:
                self._trust.set_record(name, *_trust(_read(value, TrustTold)))
            case (str(kind),) if kind == INDEX:
                self._open(_read(value, IndexTold))
            case (str(kind),) if kind == GENERAL:
                self._general = _read(value, GeneralTold) or self._general
            case _:
                if self._calibration is not None:
                    _put_costs(self._calibration, key, _read(value, ScalesTold))

    def _put_worker(self, name: str, told: WorkerTold | None) -> None:
        if told is None:
            self._maps.put(name, ())
            self._fleet.remove(name)
            return
        self._maps.put(name, told.ranks)
        self._holders.stamp(name, [one.applied_at_s for one in told.ranks])
        self._fleet.put(told)

    def _open(self, told: IndexTold | None) -> None:
        if told is not None and self._holders.open(told):
            self.deciding.index_replaced()
            _log.info("another index is read from now on")

    def _priority_of(self, objective: str) -> int | None:
        return self._general.objectives.get(objective)

    def _on_joined(self, worker: str) -> None:
        self.deciding.joined(worker)

    def _on_removed(self, worker: str) -> None:
        self.deciding.recorder.flush()
        self.deciding.removed(worker)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_S)
            self._reaped.inc(self._board.reap(time.monotonic()))


def _put_costs(calibration: FollowedCalibration, key: Key, told: ScalesTold | None) -> None:
    state = told.scales[0] if told is not None else None
    match key:
        case (str(kind),) if kind == FLEET_COSTS and told is not None:
            calibration.put_fleet(*told.scales)
        case (str(kind), name) if kind == WORKER_COSTS:
            calibration.put_worker(name, state)
        case (str(kind), source, destination) if kind == LINK_COSTS:
            calibration.put_link(source, destination, state)


def _read(value: bytes | None, kind: type[_T]) -> _T | None:
    return msgspec.msgpack.decode(value, type=kind) if value is not None else None


def _trust(told: TrustTold | None) -> tuple[float, float, float]:
    return (told.promised, told.kept, told.at_s) if told is not None else (0.0, 0.0, 0.0)


def _told_index(telling: Telling) -> IndexTold:
    """Of the first telling, which always has it: the keeper tells nobody before there is one."""
    return next(
        msgspec.msgpack.decode(entry.value, type=IndexTold)
        for entry in telling.entries
        if entry.key == (INDEX,) and entry.value is not None
    )
