# SPDX-License-Identifier: Apache-2.0
"""What the store did for requests with a plan, said to the router's reports (`reports/sink.py`). Pure; for one thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_ext.vllm.reports.sink import OK, STORAGE_SOURCE, ReportSink
from engine_ext.vllm.storage.jobs import Outcome
from engine_ext.vllm.storage.lookups import Verdict


@dataclass(slots=True)
class _Visit:
    plan_id: str
    asked: set[bytes] = field(default_factory=set)
    settled: set[bytes] = field(default_factory=set)
    began_s: float = 0.0
    new_asked: int = 0
    new_hits: int = 0
    new_misses: int = 0


class Account:
    """Each block of a request counts once: with its first question, and with the first verdict on it."""

    def __init__(self, reports: ReportSink) -> None:
        self._reports = reports
        self._visits: dict[str, _Visit] = {}
        self._changed: set[str] = set()
        self._loads: dict[int, str] = {}

    def begin(self, request: str, plan_id: str) -> None:
        self._visits[request] = _Visit(plan_id)

    def looked_up(self, request: str, key: bytes, verdict: Verdict, now_s: float) -> None:
        visit = self._visits.get(request)
        if visit is None or key in visit.settled:
            return
        if key not in visit.asked:
            visit.began_s = visit.began_s if visit.asked else now_s
            visit.asked.add(key)
            visit.new_asked += 1
        if verdict is not Verdict.WAIT:
            visit.settled.add(key)
            visit.new_hits += verdict is Verdict.HIT
            visit.new_misses += verdict is Verdict.MISS
        self._changed.add(request)

    def step_end(self, now_s: float) -> None:
        """Says what this step's lookups came to."""
        for request in self._changed:
            visit = self._visits[request]
            self._reports.asked(request, visit.plan_id, STORAGE_SOURCE, visit.new_asked)
            if visit.new_hits or visit.new_misses:
                seconds = now_s - visit.began_s
                self._reports.answered(request, STORAGE_SOURCE, visit.new_hits, visit.new_misses, seconds)
            visit.new_asked = visit.new_hits = visit.new_misses = 0
        self._changed.clear()

    def loading(self, job_id: int, request: str) -> None:
        if request in self._visits:
            self._loads[job_id] = request

    def ended(self, outcome: Outcome) -> None:
        request = self._loads.pop(outcome.job_id, None)
        if request is not None:
            result = OK if outcome.success else "deadline" if outcome.late else "missing"
            blocks = len(outcome.good_keys)
            self._reports.moved(request, STORAGE_SOURCE, blocks, outcome.size_bytes, outcome.seconds, result)

    def forget(self, request: str) -> None:
        self._visits.pop(request, None)
        self._changed.discard(request)
