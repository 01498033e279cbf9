# SPDX-License-Identifier: Apache-2.0
"""The admin API of several processes: what each says, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from router.decisions.reports import Taken
from router.errors import NotFoundError
from router.processes.everyone import ServedByAll
from router.processes.records import DECISION, DECISIONS, QUEUE, REPORTS, TRIALS, TROUBLES, ShownRecord

_encode = msgspec.json.encode


class Processes:
    """In place of the feed: what two processes answer."""

    def __init__(self, **answers: list[object]) -> None:
        self._answers = answers
        self.asked: list[tuple[str, bytes]] = []

    async def ask(self, what: str, body: bytes = b"") -> Mapping[int, bytes]:
        self.asked.append((what, body))
        return {process: _encode(answer) for process, answer in enumerate(self._answers.get(what, []))}


class Desk:
    """In place of the keeper's report desk."""

    def read(self, body: bytes) -> Any:
        return type("Batch", (), {"reports": [1, 2, 3]})()

    def settle(self, outcomes: list[str | None]) -> Taken:
        return Taken(joined=outcomes.count("joined"), unknown=outcomes.count(None))


def everyone(**answers: list[object]) -> ServedByAll:
    return ServedByAll(Processes(**answers), Desk(), CollectorRegistry())  # type: ignore[arg-type]


def record(name: str, time_unix_s: float) -> ShownRecord:
    return ShownRecord(time_unix_s, msgspec.Raw(_encode({"id": name})))


async def test_decisions_of_all_come_newest_first_and_no_more_than_asked_for() -> None:
    one = everyone(**{DECISIONS: [[record("c", 3.0), record("a", 1.0)], [record("b", 2.0)]]})
    shown = await one.decisions(2, None, None, None)
    assert [msgspec.json.decode(row) for row in shown] == [{"id": "c"}, {"id": "b"}]


async def test_a_decision_is_found_wherever_it_is_and_the_newest_counts() -> None:
    one = everyone(**{DECISION: [[record("old", 1.0)], [record("first", 2.0), record("retry", 3.0)]]})
    assert await one.decision("x") == {"id": "retry", "earlier_attempts": [{"id": "first"}]}
    with pytest.raises(NotFoundError):
        await everyone(**{DECISION: [[], []]}).decision("x")
    with pytest.raises(NotFoundError):
        await everyone().decision("x")


async def test_queues_trials_and_troubles_add_up() -> None:
    def queue(waiting: int, oldest_s: float | None) -> dict[str, object]:
        row = {
            "tenant": "chat", "waiting": waiting, "waiting_prefill_s": 0.5, "oldest_wait_s": oldest_s, "in_flight": 2
        }  # fmt: skip
        return {"waiting": waiting, "max_waiting": 500, "tenants": [row]}

    view = {"share": 0.01, "saved": 0.5, "count": 2.0, "lost": 0.1}
    one = everyone(
        **{
            QUEUE: [queue(1, 0.25), queue(0, None)],
            TRIALS: [view, view],
            TROUBLES: [["No space left on device"], ["No space left on device"]],
        }
    )
    merged = await one.queue()
    assert (merged["waiting"], merged["max_waiting"]) == (1, 1000)
    [row] = merged["tenants"]
    assert (row["waiting"], row["in_flight"], row["oldest_wait_s"]) == (1, 4, 0.25)
    assert await one.trials() == {"share": 0.01, "saved": 1.0, "count": 4.0, "lost": 0.2}
    assert await one.troubles() == ["No space left on device"]
    assert await everyone(**{TRIALS: [None, None]}).trials() is None


async def test_a_report_is_unknown_only_where_no_process_knows_its_plan() -> None:
    one = everyone(**{REPORTS: [["joined", None, None], [None, None, "joined"]]})
    assert await one.take_reports(b"batch") == Taken(joined=2, unknown=1)
