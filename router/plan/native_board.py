# SPDX-License-Identifier: Apache-2.0
"""The load board of the native core, by name of the worker. The semantics are those of ``router.plan.load``.

The core numbers workers. A number is kept as long as the worker is known here: named by anyone and not forgotten, or
with requests under way, or held by the planner's table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from indexer import _core
from router.plan.load import NOWHERE, Resident, Shared


class NativeLoadBoard:
    """Implements ``router.plan.load.Board``. O(1) but for ``forget`` and ``sessions``, which are O(workers)."""

    def __init__(self) -> None:
        self.core = _core.LoadBoard()
        self.residents = _core.Residents()
        self._resident: dict[int, list[int]] = {}
        """By ticket, what ``residents`` knows its prompts by."""
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._held: set[str] = set()
        self._leaving: set[str] = set()
        """Forgotten, and not named since."""

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
            self._resident[ticket] = [self.residents.begin(row, size, one) for one in resident.hashes]
        return ticket

    def first_token(self, ticket: int, now_s: float) -> None:
        self.core.first_token(ticket, now_s)

    def release(self, ticket: int, now_s: float) -> None:
        for number in self._resident.pop(ticket, ()):
            self.residents.end(number)
        self.core.release(ticket, now_s)
        for worker in [*self._leaving]:
            self._free(worker)

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
        return self.core.queue_s(self.row(worker, dp_rank), now_s) if worker in self._numbers else 0.0

    def decodes(self, worker: str, dp_rank: int, now_s: float) -> int:
        return self.core.decodes(self.row(worker, dp_rank), now_s) if worker in self._numbers else 0

    def prefilled_s(self, worker: str, dp_rank: int) -> float:
        return self.core.prefilled_s(self.row(worker, dp_rank)) if worker in self._numbers else 0.0

    def prefill_tokens(self, worker: str, dp_rank: int) -> int:
        return self.core.prefill_tokens(self.row(worker, dp_rank)) if worker in self._numbers else 0

    def active_tokens(self, worker: str, dp_rank: int) -> int:
        return self.core.active_tokens(self.row(worker, dp_rank)) if worker in self._numbers else 0

    def pulls(self, worker: str) -> float:
        return self.core.pulls(self._numbers[worker]) if worker in self._numbers else 0.0

    def sessions(self, worker: str) -> AbstractSet[str]:
        if worker not in self._numbers:
            return frozenset()
        return frozenset(self._names[source] for source in self.core.sessions(self._numbers[worker]))

    def in_flight(self, worker: str) -> int:
        return self.core.in_flight(self._numbers[worker]) if worker in self._numbers else 0

    def shared(self, resident: Resident) -> Shared:
        found: Counter[int] = Counter()
        for one in resident.hashes:
            found.update(dict(self.residents.shared(resident.block_size_tokens, one)))

        def blocks(worker: str, dp_rank: int) -> int:
            return found[self.row(worker, dp_rank)] if worker in self._numbers else 0

        return blocks

    def resident_tokens(self, worker: str, dp_rank: int) -> int:
        return self.residents.tokens(self.row(worker, dp_rank)) if worker in self._numbers else 0

    def _number(self, worker: str) -> int:
        number = self._numbers.get(worker)
        if number is None:
            number = self._numbers[worker] = self.core.add_worker()
            self._names[number] = worker
        return number

    def _free(self, worker: str) -> None:
        """Give the number of a forgotten worker away, unless it is held or has requests under way."""
        if worker not in self._held and self.core.drop_worker(self._numbers[worker]):
            del self._names[self._numbers.pop(worker)]
            self._leaving.discard(worker)
