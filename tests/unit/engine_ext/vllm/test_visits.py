# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from engine_ext.vllm.reports.sink import NoReports
from engine_ext.vllm.visits import HostVisits

A, B, C, D = (bytes([i]) * 32 for i in range(4))
CHUNK_BYTES = 1000


class Recorded:
    """A sink that keeps its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        assert hasattr(NoReports, name), name
        return lambda *arguments: self.calls.append((name, *arguments))

    def take(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def sink() -> Recorded:
    return Recorded()


@pytest.fixture
def visits(sink: Recorded) -> HostVisits:
    return HostVisits(sink, CHUNK_BYTES, ends_reports=False)


def test_what_was_found_in_ram_is_counted_at_the_first_lookup_and_said_once(
    sink: Recorded, visits: HostVisits
) -> None:
    visit = visits.begin("r", "plan")
    visits.looked_up(visit, A, found=True)
    visits.looked_up(visit, B, found=True)
    visits.looked_up(visit, C, found=False)
    visits.looked_up(visit, A, found=True)
    visits.looked_up(visit, C, found=True)  # a pull has brought it meanwhile
    assert sink.take() == [("began", "r", "plan")]
    visits.settle(visit)
    visits.settle(visit)
    assert sink.take() == [("asked", "r", "plan", "ram", 3), ("answered", "r", "ram", 2, 1, 0.0)]
    visits.looked_up(visit, D, found=True)
    visits.end(visit)
    assert sink.take() == []


def test_a_request_that_never_looked_says_nothing_of_ram(sink: Recorded, visits: HostVisits) -> None:
    visits.end(visits.begin("r", "plan"))
    assert sink.take() == [("began", "r", "plan")]


def test_a_promotion_is_its_chunks_its_bytes_and_the_time_until_the_scheduler_knows(
    sink: Recorded, visits: HostVisits
) -> None:
    visit = visits.begin("r", "plan")
    visits.loading(visit, [A, B, C], 10.0)
    visits.loading(visit, [D], 11.0)
    sink.take()
    visits.loaded(visit, {D}, 11.5)
    visits.loaded(visit, {C, B, A}, 12.0)
    visits.loaded(visit, {A}, 13.0)
    assert sink.take() == [("promoted", "r", 1, CHUNK_BYTES, 0.5), ("promoted", "r", 3, 3 * CHUNK_BYTES, 2.0)]


def test_lookups_are_over_when_a_load_begins(sink: Recorded, visits: HostVisits) -> None:
    visit = visits.begin("r", "plan")
    visits.looked_up(visit, A, found=True)
    visits.loading(visit, [A], 1.0)
    assert ("answered", "r", "ram", 1, 0, 0.0) in sink.take()


def test_chunks_that_are_evicted_before_anybody_read_them_are_said_per_request(
    sink: Recorded, visits: HostVisits
) -> None:
    one, other = visits.begin("one", "p1"), visits.begin("other", "p2")
    visits.brought(one, [A, B])
    visits.brought(other, [C])
    visits.read([A])
    visits.end(one)
    sink.take()
    visits.evicted([A, B, C, D])
    assert sorted(sink.take()) == [("evicted", "one", 1), ("evicted", "other", 1)]
    visits.evicted([A, B, C, D])
    assert sink.take() == []


def test_a_reset_is_no_eviction(sink: Recorded, visits: HostVisits) -> None:
    visits.brought(visits.begin("r", "plan"), [A])
    sink.take()
    visits.forget()
    visits.evicted([A])
    assert sink.take() == []


def test_where_nobody_else_does_the_end_of_a_request_sends_its_report_last(sink: Recorded) -> None:
    visits = HostVisits(sink, CHUNK_BYTES, ends_reports=True)
    visit = visits.begin("r", "plan")
    visits.looked_up(visit, A, found=True)
    visits.end(visit)
    assert sink.take()[-2:] == [("answered", "r", "ram", 1, 0, 0.0), ("finished", "r")]
