# SPDX-License-Identifier: Apache-2.0
"""The load board: what is promised to each rank and not yet seen done. Time is an argument; no I/O.

A request counts from the moment of its decision, so a burst that arrives between two polls still spreads. It is
prefilling until its first token, decoding until it ends, and released exactly once. What others send to the
same worker is known only from its metrics and is added as an estimate that ages out.

Two implementations: the one below and ``router.plan.native_board``; a property test drives both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from router.plan.residents import NONE_LEADING, Leading, Residents

MOST_SOURCES = 3
PULL = 6
"""Units of a whole pull, so that shares of it are whole numbers too."""
_SAMPLE_MAX_AGE_S = 5.0
_MEAN_WEIGHT = 0.05
_NONE: AbstractSet[str] = frozenset()


class Resident(NamedTuple):
    """Prompts as they take room in HBM: the hashes of their full blocks."""

    block_size_tokens: int
    hashes: Sequence[bytes]
    """Per prompt, 8 bytes per block."""
    loading_s: float = 0.0
    """From the decision until those sent behind it find its blocks in HBM; infinite: they are not to be counted on."""

    def ready_s(self, now_s: float) -> float:
        """When that will be; minus infinity where it is never."""
        return now_s + self.loading_s if self.loading_s < math.inf else -math.inf


NOWHERE = Resident(0, ())
"""Of prompts that nothing is known of."""

InFlight = Callable[[str, int], Sequence[Leading]]
"""Per prompt of some, what a rank of a worker has in flight of it."""


class Board(Protocol):
    """Promises by rank."""

    def promise(
        self,
        worker: str,
        dp_rank: int,
        prefill_s: float,
        ttft_s: float,
        now_s: float,
        sources: Sequence[str] = (),
        *,
        observable: bool = True,
        prompt_tokens: int = 0,
        missing_tokens: int = 0,
        resident: Resident = NOWHERE,
    ) -> int:
        """Count a request from now on; returns its ticket.

        ``prefill_s`` is what it adds to the queue, ``ttft_s`` when its first token is predicted. Token counts
        (``missing_tokens``: of the prompt, to be computed) are for policies that count tokens, not seconds.
        ``observable``: its first token will be seen (it streams); otherwise only its end. ``sources``: workers that it
        pulls from, ``MOST_SOURCES`` at most. ``resident``: what it takes room for in HBM until it is released.
        """

    def first_token(self, ticket: int, now_s: float) -> None:
        """The prefill of a request is done."""

    def release(self, ticket: int, now_s: float) -> None:
        """The request is over, however it ended. Later calls change nothing."""

    def sampled(self, worker: str, running: int, waiting: int, now_s: float) -> None:
        """A poll of the worker's metrics."""

    def forget(self, worker: str) -> None:
        """The worker left the fleet, or is another process; promises to it still end by ``release``."""

    def reap(self, now_s: float) -> int:
        """Where several processes share the board: end what dead ones left open; returns how many requests.

        To be called by every process about once a second.
        """
        ...

    def queue_s(self, worker: str, dp_rank: int, now_s: float) -> float:
        """Prefill seconds ahead of a request that comes now."""
        ...

    def decodes(self, worker: str, dp_rank: int, now_s: float) -> int:
        """Requests decoding on the rank."""
        ...

    def prefilled_s(self, worker: str, dp_rank: int) -> float:
        """Predicted seconds of all prefills that have ended on the rank: a count that only grows."""
        ...

    def prefill_tokens(self, worker: str, dp_rank: int) -> int:
        """Prompt tokens that the rank has to compute for requests without a first token yet."""
        ...

    def active_tokens(self, worker: str, dp_rank: int) -> int:
        """Prompt tokens of all our requests on the rank, those that decode included."""
        ...

    def pulls(self, worker: str) -> float:
        """Pulls that cross the worker's link now, as source or as destination.

        Of a request with several sources each counts for its share: less comes from it.
        """
        ...

    def sessions(self, worker: str) -> AbstractSet[str]:
        """Sources that the worker has pulled from: connecting to them is paid for."""
        ...

    def in_flight(self, worker: str) -> int:
        """Our requests at the worker."""
        ...

    def leading(self, resident: Resident) -> InFlight:
        """Of each prompt, the leading blocks that are also those of a request in flight at a rank."""
        ...

    def resident_tokens(self, worker: str, dp_rank: int) -> int:
        """Distinct prompt tokens in flight at the rank."""
        ...


@dataclass(slots=True)
class Promise:
    """One request on the board."""

    worker: str
    dp_rank: int
    prefill_s: float
    first_token_due_s: float
    sources: tuple[str, ...]
    observable: bool
    """Its first token will be seen (it streams); otherwise only its end."""
    prompt_tokens: int = 0
    missing_tokens: int = 0
    prefilling: bool = True


@dataclass(slots=True)
class _Rank:
    prefilling: dict[int, Promise] = field(default_factory=dict)
    prefill_s: float = 0.0
    decodes: int = 0
    prefill_tokens: int = 0
    active_tokens: int = 0
    progress_since_s: float = 0.0
    prefilled_s: float = 0.0


@dataclass(slots=True)
class _Sample:
    running: int
    waiting: int
    in_flight: int
    """The most of ours at once since the sample before: a gauge may be from any moment between."""
    at_s: float


class LoadBoard:
    """A board in plain Python, the reference of the native one. All operations are O(1)."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, int], _Rank] = {}
        self._promises: dict[int, Promise] = {}
        self._pulls: Counter[str] = Counter()
        self._sessions: dict[str, set[str]] = {}
        self._in_flight: Counter[str] = Counter()
        self._peaks: dict[str, int] = {}
        self._samples: dict[str, _Sample] = {}
        self.residents: Residents[tuple[str, int]] = Residents()
        self._resident: dict[int, list[int]] = {}
        """By ticket, what ``residents`` knows its prompts by."""
        self._leaving: set[str] = set()
        """Forgotten, but with requests under way."""
        self._next_id = 0
        self._mean_prefill_s = 0.0

    def promise(
        self,
        worker: str,
        dp_rank: int,
        prefill_s: float,
        ttft_s: float,
        now_s: float,
        sources: Sequence[str] = (),
        *,
        observable: bool = True,
        prompt_tokens: int = 0,
        missing_tokens: int = 0,
        resident: Resident = NOWHERE,
    ) -> int:
        if len(sources) > MOST_SOURCES:
            raise ValueError(f"a request pulls from {MOST_SOURCES} workers at most")
        self._leaving.discard(worker)
        ticket, self._next_id = self._next_id, self._next_id + 1
        due_s = now_s + ttft_s
        promise = Promise(
            worker, dp_rank, prefill_s, due_s, tuple(sources), observable, prompt_tokens, missing_tokens
        )
        rank = self._ranks.setdefault((worker, dp_rank), _Rank())
        if not rank.prefilling:
            rank.progress_since_s = now_s
        rank.prefilling[ticket] = promise
        rank.prefill_s += prefill_s
        rank.prefill_tokens += missing_tokens
        rank.active_tokens += prompt_tokens
        self._promises[ticket] = promise
        self._mean_prefill_s += _MEAN_WEIGHT * (prefill_s - self._mean_prefill_s)
        self._in_flight[worker] += 1
        self._peaks[worker] = max(self._peaks.get(worker, 0), self._in_flight[worker])
        for source in sources:
            self._pulls[source] += PULL // len(sources)
            self._pulls[worker] += PULL // len(sources)
            self._sessions.setdefault(worker, set()).add(source)
        if resident.hashes:
            row, size = (worker, dp_rank), resident.block_size_tokens
            ready_s = resident.ready_s(now_s)
            self._resident[ticket] = [
                self.residents.begin(row, size, one, ready_s) for one in resident.hashes
            ]
        return ticket

    def first_token(self, ticket: int, now_s: float) -> None:
        promise = self._promises.get(ticket)
        if promise is not None and promise.prefilling:
            self._end_prefill(ticket, promise, now_s)
            self._ranks[promise.worker, promise.dp_rank].decodes += 1

    def release(self, ticket: int, now_s: float) -> None:
        promise = self._promises.pop(ticket, None)
        if promise is None:
            return
        for number in self._resident.pop(ticket, ()):
            self.residents.end(number)
        _decrement(self._in_flight, promise.worker)
        rank = self._ranks[promise.worker, promise.dp_rank]
        rank.active_tokens -= promise.prompt_tokens
        if promise.prefilling:
            self._end_prefill(ticket, promise, now_s)
        else:
            rank.decodes -= 1
        if promise.worker in self._leaving and not self._in_flight[promise.worker]:
            self._clear(promise.worker)

    def sampled(self, worker: str, running: int, waiting: int, now_s: float) -> None:
        self._leaving.discard(worker)
        self._samples[worker] = _Sample(running, waiting, self._peaks.get(worker, 0), now_s)
        self._peaks[worker] = self._in_flight[worker]

    def forget(self, worker: str) -> None:
        self._samples.pop(worker, None)
        self._peaks.pop(worker, None)
        self._sessions.pop(worker, None)
        for sources in self._sessions.values():
            sources.discard(worker)
        if self._in_flight[worker]:
            self._leaving.add(worker)
        else:
            self._clear(worker)

    def reap(self, now_s: float) -> int:
        return 0

    def queue_s(self, worker: str, dp_rank: int, now_s: float) -> float:
        rank = self._ranks.get((worker, dp_rank))
        own_s = 0.0
        if rank is not None and rank.prefilling:
            # The engine works on something as long as the head is not overdue: on the head, or, while that one
            # loads, on those behind it. An overdue head means a slow or stuck engine: then nothing is assumed.
            head = next(iter(rank.prefilling.values()))
            progress_s = max(now_s - rank.progress_since_s, 0.0)
            if head.observable:
                due_s = max(head.first_token_due_s - rank.progress_since_s, head.prefill_s)
                progress_s = min(progress_s, due_s)
            own_s = max(rank.prefill_s - progress_s, 0.0)
        return own_s + self._others(worker, now_s)[1] * self._mean_prefill_s

    def decodes(self, worker: str, dp_rank: int, now_s: float) -> int:
        rank = self._ranks.get((worker, dp_rank))
        return (rank.decodes if rank is not None else 0) + self._others(worker, now_s)[0]

    def prefilled_s(self, worker: str, dp_rank: int) -> float:
        rank = self._ranks.get((worker, dp_rank))
        return rank.prefilled_s if rank is not None else 0.0

    def prefill_tokens(self, worker: str, dp_rank: int) -> int:
        rank = self._ranks.get((worker, dp_rank))
        return rank.prefill_tokens if rank is not None else 0

    def active_tokens(self, worker: str, dp_rank: int) -> int:
        rank = self._ranks.get((worker, dp_rank))
        return rank.active_tokens if rank is not None else 0

    def pulls(self, worker: str) -> float:
        return self._pulls[worker] / PULL

    def sessions(self, worker: str) -> AbstractSet[str]:
        return frozenset(self._sessions.get(worker, _NONE))  # of now, whatever is promised next

    def in_flight(self, worker: str) -> int:
        return self._in_flight[worker]

    def leading(self, resident: Resident) -> InFlight:
        size = resident.block_size_tokens
        found = [self.residents.leading(size, one) for one in resident.hashes]
        return lambda worker, dp_rank: [one.get((worker, dp_rank), NONE_LEADING) for one in found]

    def resident_tokens(self, worker: str, dp_rank: int) -> int:
        return self.residents.tokens((worker, dp_rank))

    def _clear(self, worker: str) -> None:
        self._leaving.discard(worker)
        for key in [key for key in self._ranks if key[0] == worker]:
            del self._ranks[key]

    def _others(self, worker: str, now_s: float) -> tuple[int, int]:
        """(running, waiting) requests that are not ours, by the last sample while it is fresh."""
        sample = self._samples.get(worker)
        if sample is None or now_s - sample.at_s > _SAMPLE_MAX_AGE_S:
            return 0, 0
        foreign = max(sample.running + sample.waiting - sample.in_flight, 0)
        waiting = min(sample.waiting, foreign)
        return foreign - waiting, waiting

    def _end_prefill(self, ticket: int, promise: Promise, now_s: float) -> None:
        promise.prefilling = False
        rank = self._ranks[promise.worker, promise.dp_rank]
        del rank.prefilling[ticket]
        rank.prefill_s = rank.prefill_s - promise.prefill_s if rank.prefilling else 0.0
        rank.prefill_tokens -= promise.missing_tokens
        rank.progress_since_s = now_s
        rank.prefilled_s += promise.prefill_s
        for source in promise.sources:
            _decrement(self._pulls, source, PULL // len(promise.sources))
            _decrement(self._pulls, promise.worker, PULL // len(promise.sources))


def _decrement(counter: Counter[str], key: str, count: int = 1) -> None:
    """Count down, and keep nothing for what is back at zero."""
    counter[key] -= count
    if counter[key] <= 0:
        del counter[key]
