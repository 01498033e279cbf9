# SPDX-License-Identifier: Apache-2.0
"""Which runs of a prompt's blocks each slot holds: recomputed from everything that is held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from indexer.identity import Tier
from indexer.reference.state import DEMOTING_BIT, DOUBTFUL_BIT


def runs(
    wanted: Sequence[int], held: Iterable[Iterable[tuple[int, int]]]
) -> list[tuple[int, int, int, int, int]]:
    """(slot, tier, start, end, doubt) up to the first block that nobody holds; ``held``: hashes and bits by slot."""
    merged = [_merged(blocks) for blocks in held]
    reach = next(
        (i for i, value in enumerate(wanted) if not any(value in blocks for blocks in merged)), len(wanted)
    )
    found = []
    for slot, blocks in enumerate(merged):
        for tier, doubt in (*((tier, 0) for tier in Tier), (Tier.RAM, 1), (Tier.RAM, 2)):
            present = [_holds(blocks.get(value, 0), tier, doubt) for value in wanted[:reach]]
            found += [(slot, int(tier), start, end, doubt) for start, end in _spans(present)]
    return sorted(found, key=lambda run: (run[:3], run[4] == 2))


def _merged(blocks: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Tier bits by request hash: a block that several groups hold is doubtful only where all of them are."""
    merged: dict[int, int] = {}
    certain: set[int] = set()
    for value, bits in blocks:
        merged[value] = merged.get(value, 0) | bits
        if bits & 1 << Tier.RAM and not bits & DOUBTFUL_BIT:
            certain.add(value)
    return {value: bits & ~DOUBTFUL_BIT if value in certain else bits for value, bits in merged.items()}


def _holds(bits: int, tier: Tier, doubt: int) -> bool:
    if doubt == 2:
        return bits & DEMOTING_BIT > 0
    if not bits & 1 << tier:
        return False
    return (bits & DOUBTFUL_BIT > 0) == (doubt == 1) if tier is Tier.RAM else doubt == 0


def _spans(present: Iterable[bool]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for i, here in enumerate(present):
        if here and spans and spans[-1][1] == i:
            spans[-1] = (spans[-1][0], i + 1)
        elif here:
            spans.append((i, i + 1))
    return spans
