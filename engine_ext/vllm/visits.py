# SPDX-License-Identifier: Apache-2.0
"""What the host tier did for each planned request, said to the router's reports. Pure; for one thread.

A chunk counts as found in host memory by its first lookup: later ones also find what was pulled for this request
meanwhile. Lookups are over when the request loads, stores or ends, and are then reported at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from .reports.sink import RAM_SOURCE, ReportSink

Key = bytes


@dataclass(slots=True)
class Visit:
    """One request with a plan."""

    request_id: str
    plan_id: str
    found: int = 0
    looked_up: set[Key] = field(default_factory=set)
    settled: bool = False
    loads: dict[frozenset[Key], float] = field(default_factory=dict)
    """When each load under way began. vLLM names its chunks in another order when it is over."""


class HostVisits:
    """All chunks have one size here, that of a row of the host tier. O(keys) per call."""

    def __init__(self, reports: ReportSink, chunk_bytes: int, *, ends_reports: bool) -> None:
        """`ends_reports`: nobody else says that a request is finished, which is what sends its report."""
        self._reports = reports
        self._chunk_bytes = chunk_bytes
        self._ends_reports = ends_reports
        self._unread: dict[Key, str] = {}

    def begin(self, request_id: str, plan_id: str) -> Visit:
        self._reports.began(request_id, plan_id)
        return Visit(request_id, plan_id)

    def looked_up(self, visit: Visit, key: Key, *, found: bool) -> None:
        if not visit.settled and key not in visit.looked_up:
            visit.looked_up.add(key)
            visit.found += found

    def settle(self, visit: Visit) -> None:
        """Its lookups are over. Finding out costs no time that could be measured."""
        if visit.settled:
            return
        visit.settled = True
        if asked := len(visit.looked_up):
            self._reports.asked(visit.request_id, visit.plan_id, RAM_SOURCE, asked)
            self._reports.answered(visit.request_id, RAM_SOURCE, visit.found, asked - visit.found, 0.0)
        visit.looked_up.clear()

    def loading(self, visit: Visit, keys: Collection[Key], now_s: float) -> None:
        self.settle(visit)
        visit.loads[frozenset(keys)] = now_s

    def loaded(self, visit: Visit, keys: Collection[Key], now_s: float) -> None:
        """The chunks are in the engine's KV cache, and its scheduler knows: the request waited until now."""
        load = frozenset(keys)
        if (began_s := visit.loads.pop(load, None)) is not None:
            size_bytes = len(load) * self._chunk_bytes
            self._reports.promoted(visit.request_id, len(load), size_bytes, now_s - began_s)

    def brought(self, visit: Visit, keys: Iterable[Key]) -> None:
        """Chunks that were not in host memory are now, for this request."""
        for key in keys:
            self._unread[key] = visit.request_id

    def read(self, keys: Iterable[Key]) -> None:
        """Somebody's load."""
        if self._unread:
            for key in keys:
                self._unread.pop(key, None)

    def evicted(self, keys: Iterable[Key]) -> None:
        """Chunks that are gone. Those that were brought in and never read are reported."""
        if self._unread:
            gone = Counter(self._unread.pop(key) for key in keys if key in self._unread)
            for request_id, chunks in gone.items():
                self._reports.evicted(request_id, chunks)

    def end(self, visit: Visit) -> None:
        self.settle(visit)
        if self._ends_reports:
            self._reports.finished(visit.request_id)

    def forget(self) -> None:
        """All chunks are gone because somebody wanted that (a reset)."""
        self._unread.clear()

    def close(self) -> None:
        self._reports.close(1.0)
