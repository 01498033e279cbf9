# SPDX-License-Identifier: Apache-2.0
"""Which part of a prompt to take from which of several peers at once. Pure; positions are chunks.

A split is made of consecutive parts, each from a peer that holds all of it, so that all together reach as far as the
last one does. Where there is a choice, parts are cut so that all transfers end at the same time, which is the soonest
the peers' own links allow. Peers that hold less of the prompt come first:

    a  ======          begin       a takes [begin, cut), b the rest: cut where a's and b's times are equal,
    b  ===========     v           or where a ends, if that is sooner
       aaaabbbbbbb

Of all pairs the one that saves most is tried, by an estimate that values every chunk alike; and likewise of all
triples. Cost: O(peers choose 3) runs looked at; few, since few sources are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from router.plan.candidate import Residence, Span
from router.plan.paths import chunk_spans, leading_blocks

MOST_PARTS = 3


class Holder(NamedTuple):
    """A peer that could be one of the sources."""

    worker: str
    runs: Sequence[Span]
    """Chunks that it holds, sorted; between two runs there is a gap."""
    bytes_per_s: float
    """With the pulls that are on its link and the destination's."""
    start_s: float
    """Session and lookup."""


class Need(NamedTuple):
    """What the destination lacks, and what a chunk of it is worth."""

    begin: int
    end: int
    """Chunks."""
    chunk_bytes: float
    gain_s: float
    """Seconds that a chunk takes less to promote than to compute, on average."""
    bytes_per_s: float
    """Of its own link, for all that it pulls at once."""


class Part(NamedTuple):
    """Chunks ``[start, end)`` from one holder, by its position."""

    holder: int
    start: int
    end: int


def chunk_runs(spans: Sequence[Span], chunk_blocks: int) -> list[Span]:
    """Runs of chunks in spans of blocks, those that touch joined."""
    runs: list[Span] = []
    for start, end in chunk_spans(spans, chunk_blocks):
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs


def missing_chunks(
    prompt_tokens: int, block_size_tokens: int, chunk_blocks: int, residence: Residence
) -> tuple[int, int]:
    """The chunks of a prompt behind the leading ones that the destination has in HBM and RAM."""
    hbm = min(leading_blocks(residence.hbm), max(prompt_tokens - 1, 0) // block_size_tokens)
    begin = hbm // chunk_blocks
    own = _run_at(chunk_runs(residence.ram, chunk_blocks), begin)
    return begin if own is None else own[1], prompt_tokens // (block_size_tokens * chunk_blocks)


def splits(holders: Sequence[Holder], need: Need) -> list[tuple[Part, ...]]:
    """The most promising split over two holders and that over three, as far as there are any."""
    order = _in_order(holders, need.begin, need.end)
    found = []
    for count in range(2, MOST_PARTS + 1):
        best: tuple[Part, ...] | None = None
        least_s = 0.0
        for chosen in combinations(order, count):
            parts = _balance(holders, chosen, need.begin, need.end)
            if parts is not None:
                estimated_s = _estimate_s(holders, parts, need)
                if best is None or estimated_s < least_s:
                    best, least_s = parts, estimated_s
        if best is not None:
            found.append(best)
    return found


def _estimate_s(holders: Sequence[Holder], parts: Sequence[Part], need: Need) -> float:
    """Until all is there, less what the chunks are worth."""
    start_s = max(holders[part.holder].start_s for part in parts)
    slowest_s = max(
        (part.end - part.start) * need.chunk_bytes / holders[part.holder].bytes_per_s for part in parts
    )
    chunks = parts[-1].end - need.begin
    through_s = chunks * need.chunk_bytes / need.bytes_per_s
    return start_s + max(slowest_s, through_s) - chunks * need.gain_s


def _in_order(holders: Sequence[Holder], begin: int, end: int) -> list[int]:
    """Those that hold the first chunk, by where their run ends; then the others, by where theirs starts."""
    keyed = []
    for position, holder in enumerate(holders):
        run = _run_at(holder.runs, begin)
        if run is not None and run[1] > begin:
            keyed.append((0, min(run[1], end), position))
            continue
        start = next((one[0] for one in holder.runs if one[0] > begin), end)
        if start < end:
            keyed.append((1, start, position))
    return [position for _, _, position in sorted(keyed)]


def _balance(
    holders: Sequence[Holder], chosen: Sequence[int], begin: int, end: int
) -> tuple[Part, ...] | None:
    """One part of each in this order; None where one would have nothing to do, or nobody holds what is between."""
    if len({holders[position].worker for position in chosen}) < len(chosen):
        return None  # ranks of one worker share its link
    lows, highs = [], []
    at = begin
    for position in chosen:
        run = _run_at(holders[position].runs, at)
        if run is None:
            return None
        at = min(run[1], end)
        lows.append(run[0])
        highs.append(at)
    rates = [holders[position].bytes_per_s for position in chosen]
    left = [_sum(rates[i:]) for i in range(len(rates))]
    parts = []
    start = begin
    for i, position in enumerate(chosen):
        cut = at
        if i + 1 < len(chosen):
            target = start + int((at - start) * (rates[i] / left[i]))
            cut = min(max(target, lows[i + 1]), highs[i])
        if cut <= start:
            return None
        parts.append(Part(position, start, cut))
        start = cut
    return tuple(parts)


def _sum(rates: Sequence[float]) -> float:
    """From the last to the first, as the native core adds them up."""
    total = 0.0
    for rate in reversed(rates):
        total += rate
    return total


def _run_at(runs: Sequence[Span], at: int) -> Span | None:
    """The run that has the boundary before chunk ``at``, its ends included."""
    return next((run for run in runs if run[0] <= at <= run[1]), None)
