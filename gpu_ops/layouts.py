# SPDX-License-Identifier: Apache-2.0
"""Where a token's keys and values lie inside a page, and the copy runs between two such layouts.

A page holds `tokens` tokens of `heads` KV heads. An atom, the K or the V of one token and head, is `head_bytes`
contiguous bytes in every layout:

    order      NHD   token, then head        HND   head, then token
    placement  JOINED  K and V of a token and head side by side (vLLM 0.32 (blocks, heads, tokens, 2 * size))
               SPLIT   all K, then all V     (vLLM 0.32 (blocks, 2, tokens, heads, size))
               SINGLE  K and V live in tensors of their own, or there is one latent (MLA)

Two pages need not cover the same tokens or heads: a page of one tensor-parallel rank holds some of the heads of a
full page, a small block some of the tokens of a large one. `copy_runs` maps what they have in common, so layout,
shard and block-size conversion are the same thing: a list of runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from .errors import PlanRefused
from .runs import CopyRun, Piece, runs_of


class Order(Enum):
    """Which of token and head varies slower."""

    NHD = "NHD"
    HND = "HND"


class Placement(Enum):
    """How K and V share a page."""

    JOINED = "joined"
    SPLIT = "split"
    SINGLE = "single"

    @property
    def planes(self) -> int:
        """Atoms per token and head."""
        return 1 if self is Placement.SINGLE else 2


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout of one page; `head_bytes` is head size times element size."""

    tokens: int
    heads: int
    head_bytes: int
    order: Order = Order.NHD
    placement: Placement = Placement.SPLIT

    def __post_init__(self) -> None:
        if min(self.tokens, self.heads, self.head_bytes) < 1:
            raise PlanRefused(f"a page needs at least one token, head and byte per head, not {self}")

    @property
    def page_bytes(self) -> int:
        return self.tokens * self.heads * self.head_bytes * self.placement.planes

    def offset(self, token: int, head: int, plane: int) -> int:
        """First byte of an atom; plane 0 is K, plane 1 is V."""
        place = token * self.heads + head if self.order is Order.NHD else head * self.tokens + token
        if self.placement is Placement.JOINED:
            place = place * 2 + plane
        else:
            place += plane * self.tokens * self.heads
        return place * self.head_bytes


@dataclass(frozen=True, slots=True)
class Origin:
    """The token and head, in common numbers, that a page's first token and head are."""

    token: int = 0
    head: int = 0


def copy_runs(
    local: PageLayout, canonical: PageLayout, local_at: Origin = Origin(), canonical_at: Origin = Origin()
) -> tuple[CopyRun, ...]:
    """Runs over everything that the two pages have in common. O(tokens * heads).

    Raises PlanRefused if their atoms differ or they have no token and head in common.
    """
    if (local.head_bytes, local.placement.planes) != (canonical.head_bytes, canonical.placement.planes):
        raise PlanRefused(f"{local} and {canonical} do not hold the same kind of keys and values")
    pieces = list(_common(local, canonical, local_at, canonical_at))
    if not pieces:
        raise PlanRefused(f"pages at {local_at} and {canonical_at} have no token and head in common")
    # Where the order differs, one side's order makes long runs and the other's short ones.
    in_local_order = runs_of(sorted(pieces, key=lambda piece: piece.local))
    in_canonical_order = runs_of(sorted(pieces, key=lambda piece: piece.canonical))
    return min(in_local_order, in_canonical_order, key=len)


def _common(
    local: PageLayout, canonical: PageLayout, local_at: Origin, canonical_at: Origin
) -> Iterator[Piece]:
    tokens = range(
        max(local_at.token, canonical_at.token),
        min(local_at.token + local.tokens, canonical_at.token + canonical.tokens),
    )
    heads = range(
        max(local_at.head, canonical_at.head),
        min(local_at.head + local.heads, canonical_at.head + canonical.heads),
    )
    for token in tokens:
        for head in heads:
            for plane in range(local.placement.planes):
                yield Piece(
                    local.offset(token - local_at.token, head - local_at.head, plane),
                    canonical.offset(token - canonical_at.token, head - canonical_at.head, plane),
                    local.head_bytes,
                )
