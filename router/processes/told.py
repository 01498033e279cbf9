# SPDX-License-Identifier: Apache-2.0
"""What the keeper tells the serving processes: the state of each thing by its key, the last one wins.

Values only. A key that is told without a value is gone.
"""

from __future__ import annotations

import msgspec

from router.costs.calibration_state import ScalesState
from router.fleet.breaker import BreakerMemory
from router.fleet.worker import WorkerStatus

Key = tuple[str, ...]
"""Its first part is one of the words below."""

INDEX = "index"
WORKER = "worker"
HOLDERS = "holders"
FLEET_COSTS = "fleet costs"
WORKER_COSTS = "worker costs"
LINK_COSTS = "link costs"
TRUST = "trust"
GENERAL = "general"


class IndexTold(msgspec.Struct, frozen=True):
    """Which shared index to read; slots in ``HoldersTold`` are those of the same generation."""

    generation: int
    path: str


class RankMapTold(msgspec.Struct, array_like=True, frozen=True):
    """The map of one rank."""

    source: str | None
    """As ``MapSources.of``."""
    applied_at_s: float | None
    """When its newest batch of events was applied."""


class WorkerTold(msgspec.Struct, frozen=True):
    """A worker of the fleet."""

    status: WorkerStatus
    draining: bool
    ready: bool
    answers: bool
    asked: bool
    """It was polled at least once."""
    breaker: BreakerMemory
    ranks: list[RankMapTold]
    """As of the newest poll; empty where the worker is not in the index."""


class RankTold(msgspec.Struct, frozen=True):
    """One rank of the running incarnation, as ``indexer.holders.RankState``."""

    slot: int
    seq: int | None
    applied_at_s: float | None
    partial: str | None
    suspect: str | None


class HoldersTold(msgspec.Struct, frozen=True):
    """The slots of a worker in the index of that generation."""

    generation: int
    model: str
    plain: bool
    store_slot: int
    since_s: float
    incarnation: int
    incarnation_reason: str
    ranks: list[RankTold]


class ScalesTold(msgspec.Struct, frozen=True):
    """What was learnt of the fleet (two), of a worker or of a link (one)."""

    scales: list[ScalesState]


class TrustTold(msgspec.Struct, frozen=True):
    """As ``Trust.record``."""

    promised: float
    kept: float
    at_s: float


class GeneralTold(msgspec.Struct, frozen=True):
    """What is known of the whole."""

    synced: bool
    """Every source of workers has told them at least once."""
    objectives: dict[str, int]
    """Priorities by name of the objective."""


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """The state of one thing."""

    key: Key
    value: bytes | None
    """One of the structs above in MessagePack; None: it is gone."""


class Telling(msgspec.Struct, tag="telling", frozen=True):
    """Changes since the message before, in one go."""

    number: int
    """Counts messages to one process."""
    taken: int
    """The last batch of observations that these states include."""
    whole: bool
    """All there is: what is not named is gone."""
    entries: list[Entry]


class Asking(msgspec.Struct, tag="asking", frozen=True):
    """A question that the process answers with the same number."""

    number: int
    what: str
    body: bytes


FromKeeper = Telling | Asking
