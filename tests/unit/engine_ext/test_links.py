# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.sim.agenda import Agenda
from engine_ext.sim.links import QueuedLink, SharedLink

Transfer = tuple[float, float]
"""(start in seconds, bytes)."""


def ends(transfers: list[Transfer], bytes_per_s: float = 100.0) -> list[float]:
    """When each transfer over one link ends."""
    agenda = Agenda()
    link = SharedLink(bytes_per_s, agenda)
    ended = [math.nan] * len(transfers)
    for number, (start_s, size_bytes) in enumerate(transfers):

        def begin(now_s: float, number: int = number, size_bytes: float = size_bytes) -> None:
            link.carry(size_bytes, lambda at_s: ended.__setitem__(number, at_s), now_s)

        agenda.at(start_s, begin)
    agenda.run(math.inf)
    return ended


def test_a_transfer_alone_has_the_whole_link() -> None:
    assert ends([(1.0, 50.0), (3.0, 100.0)]) == pytest.approx([1.5, 4.0])


def test_two_at_once_take_twice_as_long() -> None:
    assert ends([(0.0, 100.0), (0.0, 100.0)]) == pytest.approx([2.0, 2.0])


def test_what_one_frees_goes_to_the_others() -> None:
    # Alone for a second, then half each: 50 bytes end at 2.0, and the first has the link for its last 50.
    assert ends([(0.0, 200.0), (1.0, 50.0)]) == pytest.approx([2.5, 2.0])
    # Three share from 1.0 on: 100 of the first are left, 30 each until 1.9, then 50 a second each.
    assert ends([(0.0, 200.0), (1.0, 30.0), (1.0, 130.0)]) == pytest.approx([3.3, 1.9, 3.6])


def test_an_empty_transfer_ends_at_once() -> None:
    assert ends([(1.0, 0.0), (0.0, 300.0)]) == pytest.approx([1.0, 3.0])


@given(
    st.lists(
        st.tuples(st.floats(0, 10, allow_nan=False), st.floats(0, 500, allow_nan=False)),
        min_size=1,
        max_size=12,
    )
)
def test_the_link_is_never_idle_with_work_and_never_beyond_its_bandwidth(transfers: list[Transfer]) -> None:
    ended = ends(transfers)
    for (start_s, size_bytes), end_s in zip(transfers, ended, strict=True):
        assert end_s >= start_s + size_bytes / 100.0 - 1e-9
    # The same work served in turns ends each busy period at the same time.
    free_s, last_s = 0.0, 0.0
    for start_s, size_bytes in sorted(transfers):
        free_s = max(free_s, start_s) + size_bytes / 100.0
        last_s = free_s
    assert max(ended) == pytest.approx(last_s, abs=1e-9)


def test_a_queue_tells_when_the_next_one_has_its_turn() -> None:
    link = QueuedLink(100.0)
    assert link.reserve(50, 1.0) == pytest.approx(1.0)
    assert link.reserve(100, 1.0) == pytest.approx(1.5)
    assert link.reserve(10, 9.0) == pytest.approx(9.0)
