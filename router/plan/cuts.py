# SPDX-License-Identifier: Apache-2.0
"""Where it can pay to load less than the engine would find. Pure.

Loading costs the same for every block of one place; recomputing costs more per block the longer the context
before it. So within one place the total falls towards the end of its run or rises all along it, and the best
cut is one of:

* the end of a run: what comes next is dearer than recomputing;
* where the load ends together with the queue: so far it cost nothing, from there on it delays the first token;
* where a pull reaches its deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from router.plan.paths import PEER, Walk, whole_chunks

MOST_RUNS = 8
"""Ends of runs that are tried; a prompt in more pieces than that is rare."""


class Affine(NamedTuple):
    """Seconds of a load: ``start_s`` once, then ``block_s`` per block."""

    start_s: float
    block_s: float

    @classmethod
    def of(cls, seconds: Callable[[int], float]) -> Affine:
        """From the seconds of one and of two blocks."""
        one_s = seconds(1)
        block_s = seconds(2) - one_s
        return cls(one_s - block_s, block_s)


class PlaceRates(NamedTuple):
    """Of RAM, the peer and storage, in the order of the places."""

    ram: Affine
    peer: Affine
    storage: Affine


def cuts(
    walk: Walk, rates: PlaceRates, chunk_blocks: int, hidden_s: float, pull_deadline_s: float
) -> list[int]:
    """Blocks behind the HBM hit, more than none and fewer than all; each ends with a whole chunk.

    ``hidden_s``: seconds of loading that the queue hides.
    """
    found: list[int] = []
    begun: set[int] = set()
    load_s = 0.0
    pull_s = 0.0
    before = 0
    for place, blocks in walk.runs[:MOST_RUNS]:
        rate = rates[place]
        first_s = 0.0 if place in begun else rate.start_s
        begun.add(place)
        reached = _reached(hidden_s - load_s - first_s, rate.block_s, blocks)
        if reached:
            found.append(before + reached)
        if place == PEER:
            # Strictly below the deadline, so one block less where it is met exactly.
            reached = _reached(pull_deadline_s - pull_s - first_s, rate.block_s, blocks)
            if reached:
                found.append(before + reached)
            pull_s += first_s + blocks * rate.block_s
        load_s += first_s + blocks * rate.block_s
        before += blocks
        found.append(before)
    whole = {whole_chunks(walk.hbm, blocks, chunk_blocks) for blocks in found}
    return sorted(whole - {0, walk.external})


def _reached(left_s: float, block_s: float, blocks: int) -> int:
    """Blocks that ``left_s`` suffices for, if that is within the run; else 0."""
    if left_s <= 0 or block_s * blocks <= left_s:
        return 0
    return int(left_s / block_s)
