# SPDX-License-Identifier: Apache-2.0
"""From what tiers say to one report per request. Pure: what happened comes as calls, in order, on one thread.

Bounded: of more than `MOST_OPEN` open requests the longest open one is reported as if it were over, and of the last
`MOST_CLOSED` reports evictions are still counted; each makes a further revision of its report.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from engine_ext.vllm.reports.messages import BOUNDS, Report, SourceReport
from engine_ext.vllm.reports.sink import OK, RAM_SOURCE, STORAGE_SOURCE, SourceKind

MOST_OPEN = 16_384
MOST_CLOSED = 4_096
UNANSWERED = "unanswered"
_KIND_OF: dict[str, SourceKind] = {RAM_SOURCE: "ram", STORAGE_SOURCE: "storage"}
_NO_WORD = re.compile(r"[^a-z0-9_]+")


@dataclass(slots=True)
class _Source:
    """What is known of one source of one request."""

    kind: SourceKind
    asked: int = 0
    hit: int = 0
    stale: int = 0
    moved: int = 0
    size_bytes: int = 0
    lookup_s: float | None = None
    transfer_s: float | None = None
    outcome: str = OK

    def looked_up(self, seconds: float) -> None:
        self.lookup_s = max(self.lookup_s or 0.0, seconds, 0.0)

    def ended(self, outcome: str) -> None:
        """The first thing that went wrong stays."""
        if self.outcome == OK:
            self.outcome = _outcome_word(outcome)

    def report(self, name: str) -> SourceReport:
        hit = max(self.hit, self.moved)
        silent = self.asked and self.lookup_s is None and self.transfer_s is None
        return SourceReport(
            source=name[: BOUNDS.text],
            kind=self.kind,
            asked_blocks=self.asked,
            hit_blocks=hit,
            missed_blocks=max(self.asked - hit, 0),
            stale_blocks=self.stale,
            moved_blocks=self.moved,
            bytes=self.size_bytes,
            lookup_s=self.lookup_s,
            transfer_s=self.transfer_s,
            outcome=UNANSWERED if silent and self.outcome == OK else self.outcome,
        )


@dataclass(slots=True)
class _Open:
    """A request that is not over."""

    plan_id: str
    sources: dict[str, _Source] = field(default_factory=dict)
    promoted: int = 0
    promotion_bytes: int = 0
    promotion_s: float | None = None
    evicted: int = 0

    @property
    def empty(self) -> bool:
        return not self.sources and self.promotion_s is None and not self.evicted


class Aggregator:
    """The calls of `ReportSink`, in the order in which they were made; `finished` with the time of day."""

    def __init__(self, most_open: int = MOST_OPEN, most_closed: int = MOST_CLOSED) -> None:
        self._most_open = most_open
        self._most_closed = most_closed
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._closed: OrderedDict[str, Report] = OrderedDict()
        self._ready: list[Report] = []
        self._revised: dict[str, None] = {}
        self._last_unix_s = 0.0

    def began(self, req_id: str, plan_id: str) -> None:
        self._opened(req_id, plan_id)

    def asked(
        self, req_id: str, plan_id: str, source: str, blocks: int, kind: SourceKind | None = None
    ) -> None:
        one = self._opened(req_id, plan_id)
        found = one.sources.get(source)
        if found is None:
            if len(one.sources) >= BOUNDS.sources:
                return
            found = one.sources[source] = _Source(kind or _KIND_OF.get(source, "pointsman"))
        found.asked += max(blocks, 0)

    def answered(self, req_id: str, source: str, hit_blocks: int, missed_blocks: int, seconds: float) -> None:
        if (found := self._source(req_id, source)) is not None:
            found.looked_up(seconds)
            found.hit += max(hit_blocks, 0)
            if found.kind in {"pointsman", "p2p"}:  # only of peers does the plan name the blocks
                found.stale += max(missed_blocks, 0)

    def failed(self, req_id: str, source: str, outcome: str, seconds: float) -> None:
        if (found := self._source(req_id, source)) is not None:
            found.looked_up(seconds)
            found.ended(outcome)

    def moved(
        self, req_id: str, source: str, blocks: int, size_bytes: int, seconds: float, outcome: str = OK
    ) -> None:
        if (found := self._source(req_id, source)) is not None:
            found.moved += max(blocks, 0)
            found.size_bytes += max(size_bytes, 0)
            found.transfer_s = (found.transfer_s or 0.0) + max(seconds, 0.0)
            if outcome != OK:
                found.ended(outcome)

    def promoted(self, req_id: str, blocks: int, size_bytes: int, seconds: float) -> None:
        if (one := self._open.get(req_id)) is not None:
            one.promoted += max(blocks, 0)
            one.promotion_bytes += max(size_bytes, 0)
            one.promotion_s = (one.promotion_s or 0.0) + max(seconds, 0.0)

    def evicted(self, req_id: str, blocks: int) -> None:
        if blocks <= 0:
            return
        if (one := self._open.get(req_id)) is not None:
            one.evicted += blocks
        elif (report := self._closed.get(req_id)) is not None:
            if req_id not in self._revised:
                self._revised[req_id] = None
                report = msgspec.structs.replace(report, revision=report.revision + 1)
            total = report.evicted_before_reuse_blocks + blocks
            self._closed[req_id] = msgspec.structs.replace(report, evicted_before_reuse_blocks=total)

    def finished(self, req_id: str, unix_s: float) -> None:
        self._last_unix_s = unix_s
        if (one := self._open.pop(req_id, None)) is not None:
            self._close(req_id, one)

    def take(self) -> list[Report]:
        """Reports that are to be sent: of requests that are over, and revisions. O(their number)."""
        ready, self._ready = self._ready, []
        ready += [self._closed[req_id] for req_id in self._revised if req_id in self._closed]
        self._revised.clear()
        return ready

    def end_all(self, unix_s: float) -> None:
        """The engine ends: every open request is over."""
        for req_id in list(self._open):
            self.finished(req_id, unix_s)

    def _opened(self, req_id: str, plan_id: str) -> _Open:
        one = self._open.get(req_id)
        if one is not None and one.plan_id == plan_id:
            return one
        if one is not None:  # the engine uses an id again
            self._close(req_id, self._open.pop(req_id))
        elif len(self._open) >= self._most_open:
            self._close(*self._open.popitem(last=False))
        one = self._open[req_id] = _Open(plan_id)
        return one

    def _source(self, req_id: str, source: str) -> _Source | None:
        one = self._open.get(req_id)
        return one.sources.get(source) if one is not None else None

    def _close(self, req_id: str, one: _Open) -> None:
        if one.empty:
            return
        report = Report(
            plan_id=one.plan_id[: BOUNDS.text],
            revision=0,
            request_id=req_id[: BOUNDS.text],
            ended_unix_s=self._last_unix_s,
            sources=tuple(source.report(name) for name, source in one.sources.items()),
            promoted_blocks=one.promoted,
            promotion_bytes=one.promotion_bytes,
            promotion_s=one.promotion_s,
            evicted_before_reuse_blocks=one.evicted,
        )
        self._ready.append(report)
        self._revised.pop(req_id, None)
        self._closed[req_id] = report
        self._closed.move_to_end(req_id)
        if len(self._closed) > self._most_closed:
            self._closed.popitem(last=False)


def _outcome_word(outcome: str) -> str:
    """As the format has it: a word, and a detail if any."""
    word, _, detail = outcome.partition(":")
    word = _NO_WORD.sub("_", word.strip().lower()) or "unknown"
    return f"{word}:{detail.strip()}"[: BOUNDS.text] if detail.strip() else word[: BOUNDS.text]
