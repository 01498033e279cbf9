# SPDX-License-Identifier: Apache-2.0
"""Which blocks stock vLLM will load from where, given an action. Pure.

The engine walks a fixed order; a request only narrows it. Read in vLLM 0.32
(``v1/core/kv_cache_manager.py``, ``kv_connector/v1/offloading/scheduler.py`` and ``kv_offload/tiering/manager.py``)
and checked against the running engine:

* HBM first: whole blocks from the start, at most n - 1 tokens, since the last token must be computed.
* Then whole chunks (``chunk_blocks`` blocks), starting with the chunk in which the HBM hit ends; each chunk is
  looked up in RAM, then in the peer, then in storage; the first that is nowhere ends the walk.
* An external hit may reach n, but one that adds less than a chunk is dropped.
* ``max_load_tokens`` ends the walk after the last whole chunk within that many tokens behind the HBM hit.
* A chunk is named by its last block: without self-describing events the others have no RAM event of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.plan.candidate import Residence, Span


class Loads(NamedTuple):
    """Blocks by where they come from; the rest is recomputed."""

    hbm: int = 0
    ram: int = 0
    peer: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        """Blocks that are not recomputed."""
        return self.hbm + self.ram + self.peer + self.storage

    @property
    def external(self) -> int:
        """Blocks that come from below HBM."""
        return self.ram + self.peer + self.storage

    def plus(self, other: Loads) -> Loads:
        """Blocks of two prompts together."""
        return Loads(*(mine + others for mine, others in zip(self, other, strict=True)))


RAM, PEER, STORAGE = range(3)
"""Places below HBM in the order of the engine's lookup."""


class Walk(NamedTuple):
    """What the engine finds of one prompt, in its order."""

    hbm: int
    """Blocks."""
    runs: tuple[tuple[int, int], ...] = ()
    """(place, blocks) behind the HBM hit; neighbours differ in place."""

    @property
    def external(self) -> int:
        """Blocks that would be loaded from below HBM."""
        return sum(blocks for _, blocks in self.runs)

    def place_behind(self, external: int) -> int | None:
        """Where the block behind that many would come from; None if there is none."""
        for place, blocks in self.runs:
            if external < blocks:
                return place
            external -= blocks
        return None

    def pulled(self, external: int | None = None) -> Span | None:
        """From the first block that comes from a peer to the last, with ``external`` of those behind the HBM hit."""
        left = self.external if external is None else external
        position, found = self.hbm, None
        for place, blocks in self.runs:
            taken = min(blocks, left)
            if place == PEER and taken:
                found = (position if found is None else found[0], position + taken)
            position += blocks
            left -= taken
        return found

    def pulled_within(self, start: int, end: int) -> int:
        """Blocks of ``[start, end)`` that come from a peer."""
        position, total = self.hbm, 0
        for place, blocks in self.runs:
            if place == PEER:
                total += max(min(position + blocks, end) - max(position, start), 0)
            position += blocks
        return total

    def loads(self, external: int | None = None) -> Loads:
        """Blocks by place; with ``external`` only that many behind the HBM hit."""
        left = self.external if external is None else external
        found = [0, 0, 0]
        for place, blocks in self.runs:
            taken = min(blocks, left)
            found[place] += taken
            left -= taken
        return Loads(self.hbm, *found)


def leading_blocks(spans: Sequence[Span]) -> int:
    """Length of the run that starts at block 0."""
    return spans[0][1] if spans and spans[0][0] == 0 else 0


def derive_walk(
    prompt_tokens: int,
    block_size_tokens: int,
    chunk_blocks: int,
    residence: Residence,
    peer_ram: Sequence[Span] = (),
) -> Walk:
    """What the engine finds for a prompt. O(spans squared), and a prompt has few."""
    hbm = min(leading_blocks(residence.hbm), max(prompt_tokens - 1, 0) // block_size_tokens)
    if not (residence.ram or peer_ram or residence.storage):
        return Walk(hbm)
    places = [chunk_spans(spans, chunk_blocks) for spans in (residence.ram, peer_ram, residence.storage)]
    end = prompt_tokens // (block_size_tokens * chunk_blocks)
    runs: list[tuple[int, int]] = []
    chunk = hbm // chunk_blocks
    position = hbm
    while chunk < end and (step := _next_step(places, chunk)) is not None:
        place, reach = step
        chunk = min(reach, end)
        blocks = chunk * chunk_blocks - position
        position += blocks
        if runs and runs[-1][0] == place:
            blocks += runs.pop()[1]
        runs.append((place, blocks))
    if position - hbm < chunk_blocks:
        return Walk(hbm)
    return Walk(hbm, tuple(runs))


def derive_loads(
    prompt_tokens: int,
    block_size_tokens: int,
    chunk_blocks: int,
    residence: Residence,
    peer_ram: Sequence[Span] = (),
    *,
    external: bool = True,
) -> Loads:
    """What the engine will load for a prompt; ``external`` False: the request forbids loading beyond HBM."""
    walk = derive_walk(prompt_tokens, block_size_tokens, chunk_blocks, residence, peer_ram)
    return walk.loads(None if external else 0)


def whole_chunks(hbm: int, external: int, chunk_blocks: int) -> int:
    """The most blocks behind an HBM hit of ``hbm``, at most ``external``, that end with a chunk; 0 for less than one."""
    fitting = (hbm + external) // chunk_blocks * chunk_blocks - hbm
    return fitting if fitting >= chunk_blocks else 0


def chunk_spans(spans: Sequence[Span], chunk_blocks: int) -> Sequence[Span]:
    """Spans of chunks whose last block lies in a span of blocks."""
    if chunk_blocks == 1:
        return spans
    chunks: list[Span] = []
    for first, last in spans:
        start, end = -(-(first + 1) // chunk_blocks) - 1, last // chunk_blocks
        if start < end and chunks and chunks[-1][1] == start:
            chunks[-1] = (chunks[-1][0], end)
        elif start < end:
            chunks.append((start, end))
    return chunks


def _next_step(places: Sequence[Sequence[Span]], chunk: int) -> tuple[int, int] | None:
    """Nearest place that has ``chunk``, and the chunk up to which it stays the nearest."""
    limit: int | None = None
    for place, spans in enumerate(places):
        for start, end in spans:
            if start <= chunk < end:
                return place, end if limit is None else min(end, limit)
            if start > chunk:
                limit = start if limit is None else min(limit, start)
                break
    return None
