# SPDX-License-Identifier: Apache-2.0
"""The `ReportSink` of an engine with routers to report to.

A call appends to a list. A thread of its own takes what has been said every `interval_s` while something is said,
makes reports of it and gives them to the senders; it sleeps while nothing is said.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from engine_ext.vllm.reports.aggregate import Aggregator
from engine_ext.vllm.reports.config import ReportConfig
from engine_ext.vllm.reports.messages import encode_report
from engine_ext.vllm.reports.sender import RouterSender
from engine_ext.vllm.reports.sink import OK, SourceKind

_log = logging.getLogger(__name__)

MOST_SAID = 262_144
"""Calls that wait for the thread, a few seconds of the busiest engine; further ones are ignored and counted."""


class ReportCounts(NamedTuple):
    """For metrics: totals since the engine began, over all routers."""

    waiting: int
    sent: int
    dropped: int
    ignored_calls: int


class Reporter:
    """Implements `ReportSink`."""

    def __init__(self, config: ReportConfig, engine: str, block_tokens: int) -> None:
        """`engine`: boot id of this process. `block_tokens`: tokens of the blocks that calls count."""
        self._interval_s = config.interval_s
        self._aggregator = Aggregator()
        self._said: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._ignored = 0
        self._awake = threading.Event()
        self._closing = threading.Event()
        self._senders = [RouterSender(url, config, engine, block_tokens) for url in config.urls]
        self._thread = threading.Thread(target=self._run, name="pointsman-reports", daemon=True)
        self._thread.start()

    def began(self, req_id: str, plan_id: str) -> None:
        self._say(self._aggregator.began, req_id, plan_id)

    def asked(
        self, req_id: str, plan_id: str, source: str, blocks: int, kind: SourceKind | None = None
    ) -> None:
        self._say(self._aggregator.asked, req_id, plan_id, source, blocks, kind)

    def answered(self, req_id: str, source: str, hit_blocks: int, missed_blocks: int, seconds: float) -> None:
        self._say(self._aggregator.answered, req_id, source, hit_blocks, missed_blocks, seconds)

    def failed(self, req_id: str, source: str, outcome: str, seconds: float) -> None:
        self._say(self._aggregator.failed, req_id, source, outcome, seconds)

    def moved(
        self, req_id: str, source: str, blocks: int, size_bytes: int, seconds: float, outcome: str = OK
    ) -> None:
        self._say(self._aggregator.moved, req_id, source, blocks, size_bytes, seconds, outcome)

    def promoted(self, req_id: str, blocks: int, size_bytes: int, seconds: float) -> None:
        self._say(self._aggregator.promoted, req_id, blocks, size_bytes, seconds)

    def evicted(self, req_id: str, blocks: int) -> None:
        self._say(self._aggregator.evicted, req_id, blocks)

    def finished(self, req_id: str) -> None:
        self._say(self._aggregator.finished, req_id, time.time())

    def close(self, timeout_s: float) -> None:
        """Requests that are still open are reported as they are."""
        ends_s = time.monotonic() + timeout_s
        self._closing.set()
        self._awake.set()
        self._thread.join(timeout_s)
        for sender in self._senders:
            sender.close(ends_s)
        for sender in self._senders:
            sender.join(max(ends_s - time.monotonic(), 0.0))

    def counts(self) -> ReportCounts:
        rows = [sender.counts() for sender in self._senders]
        waiting, sent, dropped = (sum(column) for column in zip(*rows, strict=True))
        return ReportCounts(waiting, sent, dropped, self._ignored)

    def _say(self, call: Callable[..., None], *values: object) -> None:
        # Appending to a deque is atomic; the length may be a little out of date, which does not matter.
        if len(self._said) >= MOST_SAID:
            self._ignored += 1
            return
        self._said.append((call, values))
        if not self._awake.is_set():
            self._awake.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._awake.wait()
            self._closing.wait(self._interval_s)
            self._awake.clear()
            self._pass_on()
        self._drain()
        self._aggregator.end_all(time.time())
        self._pass_on()

    def _pass_on(self) -> None:
        self._drain()
        reports = [encode_report(one) for one in self._aggregator.take()]
        if reports:
            for sender in self._senders:
                sender.add(reports)

    def _drain(self) -> None:
        for _ in range(len(self._said)):
            call, values = self._said.popleft()
            try:
                call(*values)
            except Exception:
                # A caller's mistake costs a report and no request.
                _log.exception("a report call was malformed")
