# SPDX-License-Identifier: Apache-2.0
"""Keeps the constants of the native table up with those that are learnt.

After a change of the whole fleet's factors every worker and link has other constants by a percent or so. They are
taken over a few per decision, so that no decision waits for all of them; those that have changed by themselves first.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from indexer import _core
from router.costs.model import WatchedCosts

Pair = tuple[str, str]
"""(source, destination)."""

PER_DECISION = 16
"""Workers, and as many links: some ten microseconds each."""

constants = attrgetter(
    "prefill_start_s",
    "prefill_s_per_token",
    "prefill_s_per_token_squared",
    "kv_bytes_per_token",
    "admit_s",
    "step_tokens",
    "decode_start_s",
    "decode_s_per_request",
    "ram_start_s",
    "ram_bytes_per_s",
    "storage_start_s",
    "storage_bytes_per_s",
)
"""Of a ``CostProfile``, in the order in which the core reads them."""


class CostsCopy:
    """Writes the constants of the workers that are in the table."""

    def __init__(self, core: _core.FleetPlanner, costs: WatchedCosts) -> None:
        self._core = core
        self._costs = costs
        self._changes = costs.watch()
        self._numbers: dict[str, int] = {}
        self._usual = costs.link("", "")  # no worker has an empty name
        self._own: set[Pair] = set()
        """Links that are not like the rest, of whatever workers."""
        # Insertion-ordered: what has waited longest is next.
        self._workers: dict[str, None] = {}
        self._links: dict[Pair, None] = {}

    def add(self, worker: str, number: int) -> None:
        """A worker is in the table, under this number."""
        self._numbers[worker] = number
        self._write_worker(worker)
        self._write_links(pair for pair in self._own if worker in pair)

    def remove(self, worker: str) -> None:
        """It is no more; the core has forgotten it."""
        del self._numbers[worker]

    def take(self) -> None:
        """Take over what has changed, or a part of it. O(1)."""
        changes = self._changes
        if changes.everything or changes.workers or changes.links:
            self._read_changes()
        if self._workers:
            self._next_workers()
        if self._links:
            self._next_links()

    def _read_changes(self) -> None:
        changes = self._changes
        self._own |= changes.links
        self._workers = dict.fromkeys(changes.workers) | self._workers
        self._links = dict.fromkeys(changes.links) | self._links
        if changes.everything:
            changes.everything = False
            self._usual = self._costs.link("", "")
            self._core.set_usual_link(self._usual)
            self._workers |= dict.fromkeys(self._numbers)
            self._links |= dict.fromkeys(self._own)
        changes.workers.clear()
        changes.links.clear()

    def _next_workers(self) -> None:
        for name in [*self._workers][:PER_DECISION]:
            del self._workers[name]
            if name in self._numbers:
                self._write_worker(name)

    def _next_links(self) -> None:
        some = [*self._links][:PER_DECISION]
        for pair in some:
            del self._links[pair]
        self._write_links(some)

    def _write_worker(self, name: str) -> None:
        self._core.set_costs(self._numbers[name], constants(self._costs.model_for(name).profile))

    def _write_links(self, pairs: Iterable[Pair]) -> None:
        for pair in [*pairs]:
            link = self._costs.link(*pair)
            like_the_rest = link == self._usual
            if like_the_rest:
                self._own.discard(pair)
            source, destination = (self._numbers.get(name) for name in pair)
            if source is None or destination is None:
                continue
            if like_the_rest:
                self._core.unset_link(source, destination)
            else:
                self._core.set_link(source, destination, link)
