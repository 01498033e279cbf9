# SPDX-License-Identifier: Apache-2.0
"""Cutting block lists into transfers and joining them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_ext.transfer.events import JobId
from engine_ext.transfer.jobs import Job, Peer
from engine_ext.transfer.parts import gather, in_order, runs

from .scripted import offer

PAIRS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 200)), min_size=1, max_size=40, unique_by=lambda p: p[1]
)


def job(pairs: list[tuple[int, int]]) -> Job:
    source, destination = [p[0] for p in pairs], [p[1] for p in pairs]
    return Job(JobId(1), Peer("A", offer(), 0, 0), 0, 1, source, destination, set(destination), len(pairs))


@given(PAIRS, st.integers(1, 9))
def test_parts_hold_every_pair_once_in_the_order_of_the_list(
    pairs: list[tuple[int, int]], part_blocks: int
) -> None:
    pull = job(pairs)
    taken = 0
    while pull.has_waiting:
        source, destination = gather([pull], part_blocks)
        here = pairs[taken : taken + part_blocks]
        assert sorted(zip(source, destination, strict=True)) == sorted(here)
        assert pull.take_share(part_blocks).destination == [to for _, to in here]
        taken += len(here)
    assert taken == len(pairs)


@given(PAIRS, st.integers(1, 39), st.integers(1, 39))
def test_joined_pulls_hold_every_pair_once(pairs: list[tuple[int, int]], first: int, begun: int) -> None:
    pulls = [job(part) for part in (pairs[:first], pairs[first:]) if part]
    rest = pairs
    if begun < first:
        pulls[0].take_share(begun)
        rest = pairs[min(begun, len(pairs)) :]
    pulls = [pull for pull in pulls if pull.has_waiting]
    if pulls:
        source, destination = gather(pulls, 40)
        assert sorted(zip(source, destination, strict=True)) == sorted(rest)
        assert destination == sorted(destination)


def test_neighbours_are_merged_however_they_are_listed() -> None:
    source, destination = [12, 10, 30, 11, 31], [2, 0, 7, 1, 8]
    of, to = in_order(source, destination)
    assert runs(source, destination) == 5
    assert (of, to) == ([10, 11, 12, 30, 31], [0, 1, 2, 7, 8])
    assert runs(of, to) == 2


def test_blocks_that_are_neighbours_on_one_side_only_stay_apart() -> None:
    assert runs(*in_order([5, 6, 7], [0, 2, 4])) == 3
