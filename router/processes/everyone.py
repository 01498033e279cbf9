# SPDX-License-Identifier: Apache-2.0
"""Answers of the admin API for all serving processes together."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from router.decisions.reports import ReportDesk, Taken
from router.errors import NotFoundError
from router.processes.feed import Feed
from router.processes.link import METRICS
from router.processes.records import (
    DECISION,
    DECISIONS,
    QUEUE,
    REPORTS,
    TRIALS,
    TROUBLES,
    DecisionsWanted,
    Queue,
    ShownRecord,
    merged_queues,
)


class ServedByAll:
    """Implements ``router.admin.served.Served``: asks every process, and puts together what they say."""

    def __init__(self, feed: Feed, reports: ReportDesk, metrics: Collector) -> None:
        """``reports`` of the keeper, who counts what concerns a batch as a whole; ``metrics`` of everybody."""
        self._feed = feed
        self._reports = reports
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(metrics)

    async def decisions(
        self, limit: int, model: str | None, worker: str | None, path: str | None
    ) -> list[Any]:
        wanted = DecisionsWanted(limit, model, worker, path)
        answers = await self._feed.ask(DECISIONS, msgspec.json.encode(wanted))
        rows = [row for body in answers.values() for row in _records(body)]
        rows.sort(key=lambda row: -row.time_unix_s)
        return [row.shown for row in rows[:limit]]

    async def decision(self, request_id: str) -> dict[str, Any]:
        answers = await self._feed.ask(DECISION, request_id.encode())
        # A client may have used an id twice, at different processes: the newest counts, as in one process.
        attempts = max(map(_records, answers.values()), key=_newest_s, default=[])
        if not attempts:
            raise NotFoundError(f"no decision {request_id}")
        *earlier, last = [msgspec.json.decode(row.shown) for row in attempts]
        shown: dict[str, Any] = last
        return shown | {"earlier_attempts": earlier}

    async def queue(self) -> dict[str, Any]:
        answers = await self._feed.ask(QUEUE)
        queues = [msgspec.json.decode(body, type=Queue) for body in answers.values()]
        shown: dict[str, Any] = msgspec.to_builtins(merged_queues(queues))
        return shown

    async def take_reports(self, body: bytes) -> Taken:
        batch = self._reports.read(body)
        outcomes: list[str | None] = [None] * len(batch.reports)
        for answer in (await self._feed.ask(REPORTS, body)).values():
            for i, outcome in enumerate(msgspec.json.decode(answer, type=list[str | None])):
                outcomes[i] = outcomes[i] or outcome
        return self._reports.settle(outcomes)

    async def trials(self) -> dict[str, float] | None:
        found: dict[str, float] = {}
        for body in (await self._feed.ask(TRIALS)).values():
            view = msgspec.json.decode(body, type=dict[str, float] | None) or {}
            for name, value in view.items():
                found[name] = value if name == "share" else found.get(name, 0.0) + value
        return found or None

    async def troubles(self) -> list[str]:
        answers = await self._feed.ask(TROUBLES)
        return sorted({one for body in answers.values() for one in msgspec.json.decode(body, type=list[str])})

    async def metrics(self) -> bytes:
        await self._feed.ask(METRICS)
        return generate_latest(self._registry)


def _records(body: bytes) -> list[ShownRecord]:
    return msgspec.json.decode(body, type=list[ShownRecord])


def _newest_s(rows: list[ShownRecord]) -> float:
    return max((row.time_unix_s for row in rows), default=0.0)
