# SPDX-License-Identifier: Apache-2.0
"""The load board of the native core, by name of the worker. The semantics are those of ``router.plan.load``.

The core numbers workers. A number is kept as long as the worker is known here: named by anyone and not forgotten, or
with requests under way, or held by the planner's table.

A board may lie in a file that every process of the node opens: what one promises, the others see at once. Each process
owns its promises; ``reap`` ends those of processes that died, however they did.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from indexer import _core
from router.plan.load import NOWHERE, InFlight, Resident
from router.plan.residents import NONE_LEADING, Leading


class NativeLoadBoard:
    """Implements ``router.plan.load.Board``. O(1) but for ``forget``, ``sessions`` and names it meets for the first
    time, which are O(workers).
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """In private memory, or in the file ``path`` of this node (or ``/proc/self/fd/N`` of a memfd).

        The file is made if it is not there, and made anew if no living process has it open. Its users need one clock
        for their times: ``time.monotonic``. A child that was forked with a board is a process of its own.

        Raises:
            OSError: the file cannot be opened or is no board of this version, there is no room for it, or 64 processes
                have it open.
        """
        self.core = _core.LoadBoard() if path is None else _core.LoadBoard(os.fspath(path))
        self._shared = path is not None
        self.residents = _core.Residents()
        self._resident: dict[int, list[int]] = {}
        """By ticket, what ``residents`` knows its prompts by; those of other processes are not known."""
        self._numbers: dict[str, int] = {}
        self._held: set[str] = set()
        self._leaving: set[str] = set()
        """Forgotten, or known from others, and not named since."""

    @property
    def overflows(self) -> int:
        """Requests that were not counted, as the board was full (131,072 at once)."""
        return self.core.overflows

    def reap(self, now_s: float) -> int:
        """Say that this process lives, and end what those that do not have left open; returns how many requests.

        To be called by every process about once a second.
        """
        ended = self.core.reap(now_s)
        self._free_leaving()
        return ended

    def close(self, now_s: float) -> None:
        """End all that this process has promised, and use the board no more."""
        self.core.leave(now_s)

    # For the planner's table

    def hold(self, worker: str) -> int:
        """The number of a worker, which stays its own until ``drop``."""
        self._held.add(worker)
        return self._number(worker)

    def drop(self, worker: str) -> None:
        """The table no longer refers to the worker's number."""
        self._held.discard(worker)
        if worker in self._leaving:
            self._free(worker)

    def row(self, worker: str, dp_rank: int) -> int:
        """The number of a rank, valid as long as that of its worker."""
        return self.core.row(self._number(worker), dp_rank)

    # As the protocol says

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
        self._leaving.discard(worker)
        self._leaving.difference_update(sources)
        ticket = self.core.promise(
            self._number(worker),
            dp_rank,
            prefill_s,
            ttft_s,
            now_s,
            [self._number(source) for source in sources],
            observable,
            prompt_tokens,
            missing_tokens,
        )
        if resident.hashes:
            row, size = self.row(worker, dp_rank), resident.block_size_tokens
            ready_s = resident.ready_s(now_s)
            self._resident[ticket] = [
                self.residents.begin(row, size, one, ready_s) for one in resident.hashes
            ]
        return ticket

    def first_token(self, ticket: int, now_s: float) -> None:
        self.core.first_token(ticket, now_s)

    def release(self, ticket: int, now_s: float) -> None:
        for number in self._resident.pop(ticket, ()):
            self.residents.end(number)
        self.core.release(ticket, now_s)
        self._free_leaving()

    def sampled(self, worker: str, running: int, waiting: int, now_s: float) -> None:
        self._leaving.discard(worker)
        self.core.sampled(self._number(worker), running, waiting, now_s)

    def forget(self, worker: str) -> None:
        number = self._numbers.get(worker)
        if number is not None:
            self.core.forget(number)
            self._leaving.add(worker)
            self._free(worker)

    def queue_s(self, worker: str, dp_rank: int, now_s: float) -> float:
        return self.core.queue_s(self.row(worker, dp_rank), now_s) if self._knows(worker) else 0.0

    def decodes(self, worker: str, dp_rank: int, now_s: float) -> int:
        return self.core.decodes(self.row(worker, dp_rank), now_s) if self._knows(worker) else 0

    def prefilled_s(self, worker: str, dp_rank: int) -> float:
        return self.core.prefilled_s(self.row(worker, dp_rank)) if self._knows(worker) else 0.0

    def prefill_tokens(self, worker: str, dp_rank: int) -> int:
        return self.core.prefill_tokens(self.row(worker, dp_rank)) if self._knows(worker) else 0

    def active_tokens(self, worker: str, dp_rank: int) -> int:
        return self.core.active_tokens(self.row(worker, dp_rank)) if self._knows(worker) else 0

    def pulls(self, worker: str) -> float:
        return self.core.pulls(self._numbers[worker]) if self._knows(worker) else 0.0

    def sessions(self, worker: str) -> AbstractSet[str]:
        if not self._knows(worker):
            return frozenset()
        return frozenset(self.core.name(source) for source in self.core.sessions(self._numbers[worker]))

    def in_flight(self, worker: str) -> int:
        return self.core.in_flight(self._numbers[worker]) if self._knows(worker) else 0

    def _knows(self, worker: str) -> bool:
        """Whether anyone has named the worker, in this process or, where the board is shared, in another."""
        if worker in self._numbers:
            return True
        number = self.core.find_worker(worker) if self._shared else None
        if number is None:
            return False
        self._numbers[worker] = number
        self._leaving.add(worker)  # only looked at: not to be kept for that
        return True

    def leading(self, resident: Resident) -> InFlight:
        size = resident.block_size_tokens
        found = [
            {row: Leading(shared, ready_s) for row, shared, ready_s in self.residents.leading(size, one)}
            for one in resident.hashes
        ]

        def at(worker: str, dp_rank: int) -> Sequence[Leading]:
            row = self.row(worker, dp_rank) if worker in self._numbers else None
            return [one.get(row, NONE_LEADING) if row is not None else NONE_LEADING for one in found]

        return at

    def resident_tokens(self, worker: str, dp_rank: int) -> int:
        return self.residents.tokens(self.row(worker, dp_rank)) if worker in self._numbers else 0

    def _number(self, worker: str) -> int:
        number = self._numbers.get(worker)
        if number is None:
            number = self._numbers[worker] = self.core.hold_worker(worker)
        return number

    def _free_leaving(self) -> None:
        for worker in [*self._leaving]:
            self._free(worker)

    def _free(self, worker: str) -> None:
        """Give the number of a forgotten worker away, unless it is held or has requests under way."""
        if worker not in self._held and self.core.drop_worker(self._numbers[worker]):
            del self._numbers[worker]
            self._leaving.discard(worker)
