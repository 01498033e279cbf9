# SPDX-License-Identifier: Apache-2.0
"""Where the map of each rank comes from: its events, or, where none can be expected, our own decisions.

    events ──no stream configured, stream broken for long, prompts answered without an event──▶ approximate
       ▲                                                                                            │
       └──────────────── the stream is connected and batches come (or no stream is due) ────────────┘

Looked at after every poll of a worker, on the event loop. What events said before a stream broke stays in the map,
and what requests that were sent since must have put into HBM is added (``indexer.approximate``); both are as good as
their promises are kept, which trust in the worker follows.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from indexer.approximate import ApproximateBlocks, SentPrompt
from indexer.holders import HolderTable, RankState
from indexer.identity import WorkerId
from router.config_sections import IndexConfig
from router.fleet.worker import WorkerStatus
from router.plan.decider import Prompts

_log = logging.getLogger(__name__)

EVENTS = "events"
APPROXIMATE = "approximate"
_BROKEN_FOR_S = 10.0  # a reconnecting stream takes up to two seconds between tries


class Why(enum.StrEnum):
    """Why a map is approximate."""

    NO_EVENTS = "no_events"  # none are configured
    DISCONNECTED = "disconnected"  # the stream is broken, or never was up
    SILENT = "silent"  # the stream is up, prompts are answered, and no event comes


MapRow = tuple[str, int, str, str, float, int]
"""(worker, rank, source, why or "", seconds since then, blocks that are guessed)."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A map came from somewhere else from then on."""

    worker: str
    source: str
    why: str


@dataclass(slots=True)
class _Rank:
    why: Why | None = None
    since_s: float = 0.0
    broken_since_s: float | None = None
    slot: int | None = None
    guess: ApproximateBlocks | None = None


class Maps(Protocol):
    """What the making of a decision asks and tells of maps."""

    def sent(self, status: WorkerStatus, dp_rank: int, prompts: Prompts | None) -> None:
        """A request goes to this rank."""

    def of(self, worker: str, dp_rank: int) -> str | None:
        """Where the map of a rank comes from; None where there is none."""
        ...


@dataclass(slots=True)
class MapSources:
    """By worker and rank. ``silent``: whether a worker answers prompts and publishes nothing."""

    holders: HolderTable
    settings: IndexConfig
    silent: Callable[[str], bool]
    monotonic_s: Callable[[], float]
    switched: Callable[[Switch], None] = lambda _: None
    _workers: dict[str, dict[int, _Rank]] = field(default_factory=dict)

    def polled(self, status: WorkerStatus) -> None:
        """A poll of this worker has ended. O(ranks + blocks that expire)."""
        worker, now_s = status.spec.id, self.monotonic_s()
        holders = self.holders.workers().get(WorkerId(worker))
        if holders is None or not self.settings.approximate:
            self._workers.pop(worker, None)
            return
        ranks = self._workers.setdefault(worker, {})
        silent = status.spec.events is not None and self.silent(worker)
        for dp_rank, state in enumerate(holders.ranks):
            rank = ranks.setdefault(dp_rank, _Rank(since_s=now_s))
            self._turn(worker, rank, self._why(status, state, rank, silent, now_s), now_s)
            if rank.guess is not None:
                if status.asleep or rank.slot != state.slot:
                    rank.guess.clear()
                rank.guess.expire(now_s)

    def sent(self, status: WorkerStatus, dp_rank: int, prompts: Prompts | None) -> None:
        """A request goes to this rank. Costs a look-up where events tell what it holds."""
        rank = self._workers.get(status.spec.id, {}).get(dp_rank)
        if rank is None or rank.why is None or prompts is None or not status.block_size_tokens:
            return
        guess = self._guess(status, dp_rank, rank)
        if guess is None:
            return
        salt = (prompts.cache_salt,) if prompts.cache_salt else ()
        for tokens in prompts.token_ids:
            namespace = prompts.namespace
            prompt = SentPrompt(tokens, status.block_size_tokens, namespace.model, namespace.lora or "", salt)
            guess.sent(prompt, self.monotonic_s())

    def restarted(self, worker: str) -> None:
        """Another process: nothing that was sent to the one before counts."""
        for rank in self._workers.get(worker, {}).values():
            if rank.guess is not None:
                rank.guess.clear()

    def forget(self, worker: str) -> None:
        """It left the fleet, and its slots with it."""
        self._workers.pop(worker, None)

    def of(self, worker: str, dp_rank: int) -> str | None:
        """``events`` or ``approximate``; None where there is no map at all."""
        rank = self._workers.get(worker, {}).get(dp_rank)
        if rank is None:
            return EVENTS if WorkerId(worker) in self.holders.workers() else None
        return EVENTS if rank.why is None else APPROXIMATE

    def approximate(self) -> dict[str, Why]:
        """Workers with an approximate map, and why (of the first such rank)."""
        return {
            worker: why
            for worker, ranks in self._workers.items()
            if (why := next((rank.why for rank in ranks.values() if rank.why is not None), None)) is not None
        }

    def rows(self) -> Iterator[MapRow]:
        """Every rank with a map."""
        now_s = self.monotonic_s()
        for worker, ranks in list(self._workers.items()):
            for dp_rank, rank in ranks.items():
                source = EVENTS if rank.why is None else APPROXIMATE
                blocks = 0 if rank.guess is None else len(rank.guess)
                yield worker, dp_rank, source, rank.why or "", now_s - rank.since_s, blocks

    def _why(
        self, status: WorkerStatus, state: RankState, rank: _Rank, silent: bool, now_s: float
    ) -> Why | None:
        if status.spec.events is None:
            return Why.NO_EVENTS
        if state.connected:
            rank.broken_since_s = None
            return Why.SILENT if silent else None
        if rank.broken_since_s is None:
            rank.broken_since_s = now_s
        broken = now_s - rank.broken_since_s >= _BROKEN_FOR_S
        return Why.DISCONNECTED if broken or rank.why is Why.DISCONNECTED else rank.why

    def _turn(self, worker: str, rank: _Rank, why: Why | None, now_s: float) -> None:
        if why is rank.why:
            return
        source = EVENTS if why is None else APPROXIMATE
        _log.info("worker %s: its map comes from %s (%s)", worker, source, why or "its events are back")
        rank.why, rank.since_s = why, now_s
        if why is None and rank.guess is not None:
            rank.guess.clear()
            rank.guess = None
        self.switched(Switch(worker, source, why or ""))

    def _guess(self, status: WorkerStatus, dp_rank: int, rank: _Rank) -> ApproximateBlocks | None:
        """That of the slot as it is now: a new incarnation begins with nothing."""
        holders = self.holders.workers().get(WorkerId(status.spec.id))
        if holders is None or dp_rank >= len(holders.ranks):
            return None
        slot = holders.ranks[dp_rank].slot
        if rank.guess is None or rank.slot != slot:
            rank.slot = slot
            rank.guess = ApproximateBlocks(self.holders.index, slot, 0, self.settings.approximate_ttl_s)
        rank.guess.capacity_blocks = status.hbm_blocks or self.settings.approximate_blocks
        return rank.guess
