# SPDX-License-Identifier: Apache-2.0
"""What the consumer did, said twice: to the metrics and to the router's reports. Pure."""

from __future__ import annotations

import re

from engine_ext.vllm.reports.sink import OK, ReportSink

from .jobs import Part
from .metrics import LOOKUP_SECONDS, LOOKUPS, PULL_BYTES, PULL_SECONDS, PULLS, Tally
from .request import PlannedRequest, PullState

_NAMED = re.compile(r"([a-z0-9_]+)(?::|$)")


class Account:
    """Chunks here are the reports' blocks."""

    def __init__(self, tally: Tally, reports: ReportSink) -> None:
        self._tally = tally
        self._reports = reports

    def began(self, request: PlannedRequest) -> None:
        self._reports.began(request.request_id, request.plan.plan_id)

    def asked(self, request: PlannedRequest, state: PullState, chunks: int) -> None:
        pull = state.pull
        self._reports.asked(request.request_id, request.plan.plan_id, pull.source, chunks, pull.kind)

    def answered(
        self, request: PlannedRequest, state: PullState, found: int, absent: int, seconds: float
    ) -> None:
        self._tally.observe(LOOKUP_SECONDS, seconds)
        self._tally.count(LOOKUPS, "found", by=found)
        self._tally.count(LOOKUPS, "absent", by=absent)
        self._reports.answered(request.request_id, state.pull.source, found, absent, seconds)

    def failed(
        self,
        request: PlannedRequest,
        state: PullState,
        chunks: int,
        reason: str,
        seconds: float,
        detail: str = "",
    ) -> None:
        """No answer about these chunks. What the detail names before a colon, if anything, becomes part of the outcome."""
        self._tally.count(LOOKUPS, reason, by=chunks)
        named = _NAMED.match(detail)
        outcome = f"{reason}:{named[1]}" if named else reason
        self._reports.failed(request.request_id, state.pull.source, outcome, seconds)

    def pulled(self, part: Part, chunks: int, size_bytes: int, seconds: float, outcome: str) -> None:
        self._tally.count(PULLS, part.kind, outcome)
        self._tally.count(PULL_BYTES, part.kind, by=size_bytes)
        if outcome == OK:
            self._tally.observe(PULL_SECONDS, seconds, part.kind)
        self._reports.moved(part.request_id, part.source, chunks, size_bytes, seconds, outcome)

    def finished(self, request_id: str) -> None:
        self._reports.finished(request_id)
