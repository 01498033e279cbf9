# SPDX-License-Identifier: Apache-2.0
"""How a block list is cut into transfers, and put in an order in which neighbours can be joined."""

from __future__ import annotations

from collections.abc import Iterator


def cut(source: list[int], destination: list[int], part_blocks: int) -> Iterator[tuple[list[int], list[int]]]:
    """Cuts two parallel lists into parts of at most `part_blocks` pairs, each sorted by destination.

    Parts keep the order of the list, so that finished parts are a prefix of it wherever transfers end in order.
    Inside a part the order is free: sorted, a run in which source and destination both grow by one stands
    together and becomes one descriptor (NIXL joins such neighbours of a strided list). O(n log part_blocks).

    >>> list(cut([7, 5, 6, 1], [2, 0, 1, 9], 3))
    [([5, 6, 7], [0, 1, 2]), ([1], [9])]
    """
    for first in range(0, len(source), part_blocks):
        yield in_order(source[first : first + part_blocks], destination[first : first + part_blocks])


def in_order(source: list[int], destination: list[int]) -> tuple[list[int], list[int]]:
    """One part. O(n log n), O(n) where it is in order.

    >>> in_order([7, 5], [2, 0])
    ([5, 7], [0, 2])
    """
    if len(destination) == 1:
        return source, destination
    of = dict(zip(destination, source, strict=True))
    to = sorted(destination)
    return [of[block] for block in to], to


def runs(source: list[int], destination: list[int]) -> int:
    """How many descriptors are left after joining neighbours.

    >>> runs([5, 6, 7, 1], [0, 1, 2, 3])
    2
    """
    return sum(
        1
        for i in range(len(source))
        if i == 0 or source[i] != source[i - 1] + 1 or destination[i] != destination[i - 1] + 1
    )
