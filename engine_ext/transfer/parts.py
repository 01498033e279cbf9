# SPDX-License-Identifier: Apache-2.0
"""How block lists are cut into transfers, joined, and put in an order in which neighbours can be merged."""

from __future__ import annotations

from collections.abc import Sequence

from .jobs import Job


def gather(jobs: Sequence[Job], part_blocks: int) -> tuple[list[int], list[int]]:
    """The next blocks of each of these pulls, at most `part_blocks` of each, as the lists of one transfer.

    A pull's parts keep the order of its list, so that finished parts are a prefix of it wherever transfers end in order.
    O(n log n) for n blocks.
    """
    if len(jobs) == 1:
        job = jobs[0]
        first = job.next_block
        if not first and len(job.destination) <= part_blocks:
            return in_order(job.source, job.destination)
        end = first + part_blocks
        return in_order(job.source[first:end], job.destination[first:end])
    source: list[int] = []
    destination: list[int] = []
    for job in jobs:
        if job.next_block:
            source += job.source[job.next_block : job.next_block + part_blocks]
            destination += job.destination[job.next_block : job.next_block + part_blocks]
        else:
            source += job.source
            destination += job.destination
    return in_order(source, destination)


def in_order(source: list[int], destination: list[int]) -> tuple[list[int], list[int]]:
    """Two parallel lists sorted by destination, so that a run in which both grow by one stands together and becomes
    one descriptor (NIXL merges such neighbours of a strided list). O(n log n), O(n) where it is in order.

    >>> in_order([7, 5], [2, 0])
    ([5, 7], [0, 2])
    """
    if len(destination) == 1:
        return source, destination
    to = sorted(destination)
    if to == destination:
        return source, destination
    of = dict(zip(destination, source, strict=True))
    return list(map(of.__getitem__, to)), to


def runs(source: list[int], destination: list[int]) -> int:
    """How many descriptors are left after merging neighbours.

    >>> runs([5, 6, 7, 1], [0, 1, 2, 3])
    2
    """
    return sum(
        1
        for i in range(len(source))
        if i == 0 or source[i] != source[i - 1] + 1 or destination[i] != destination[i - 1] + 1
    )
