# SPDX-License-Identifier: Apache-2.0
"""Cutting block lists into transfers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_ext.transfer.parts import cut, runs


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=40, unique_by=lambda p: p[1]
    ),
    st.integers(1, 9),
)
def test_parts_hold_every_pair_once_in_the_order_of_the_list(
    pairs: list[tuple[int, int]], part_blocks: int
) -> None:
    source, destination = [p[0] for p in pairs], [p[1] for p in pairs]
    parts = list(cut(source, destination, part_blocks))
    for number, (of, to) in enumerate(parts):
        here = pairs[number * part_blocks : (number + 1) * part_blocks]
        assert sorted(zip(of, to, strict=True)) == sorted(here)
    assert sum(len(of) for of, _ in parts) == len(pairs)


def test_neighbours_are_joined_however_they_are_listed() -> None:
    source, destination = [12, 10, 30, 11, 31], [2, 0, 7, 1, 8]
    ((of, to),) = cut(source, destination, 100)
    assert runs(source, destination) == 5
    assert (of, to) == ([10, 11, 12, 30, 31], [0, 1, 2, 7, 8])
    assert runs(of, to) == 2


def test_blocks_that_are_neighbours_on_one_side_only_stay_apart() -> None:
    ((of, to),) = cut([5, 6, 7], [0, 2, 4], 100)
    assert runs(of, to) == 3
