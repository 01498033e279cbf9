# SPDX-License-Identifier: Apache-2.0
"""Copy runs: which bytes of a worker's page are which bytes of a canonical page.

A run is the strided correspondence that vLLM's workers carry for every layer
(`vllm/v1/kv_offload/base.py`, CopyRun, read in 0.32): for i in range(num_fragments), the bytes
[local_offset + i * local_stride, + fragment_size) of the worker's page are the bytes
[canonical_offset + i * canonical_stride, + fragment_size) of the canonical page. "Local" is the page in the GPU's
KV cache, "canonical" the page in host memory. All figures are bytes.

vLLM's own objects fit `Run` as they are; `CopyRun` is for callers without vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Run(Protocol):
    """What this package reads of a copy run."""

    @property
    def local_offset(self) -> int: ...
    @property
    def canonical_offset(self) -> int: ...
    @property
    def fragment_size(self) -> int: ...
    @property
    def num_fragments(self) -> int: ...
    @property
    def local_stride(self) -> int: ...
    @property
    def canonical_stride(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CopyRun:
    """A run of our own making, with the field names of vLLM's."""

    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


def whole_page(size_bytes: int) -> CopyRun:
    """The run of a page that looks the same on both sides."""
    return CopyRun(0, 0, size_bytes, 1, size_bytes, size_bytes)


def run_bytes(run: Run) -> int:
    """Payload of one page: what one pass over the run copies."""
    return run.fragment_size * run.num_fragments


def local_end(run: Run) -> int:
    """First byte of the worker's page behind the run."""
    return run.local_offset + (run.num_fragments - 1) * run.local_stride + run.fragment_size


def canonical_end(run: Run) -> int:
    """First byte of the canonical page behind the run."""
    return run.canonical_offset + (run.num_fragments - 1) * run.canonical_stride + run.fragment_size


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that are contiguous on both sides."""

    local: int
    canonical: int
    size_bytes: int


def runs_of(pieces: Iterable[Piece]) -> tuple[CopyRun, ...]:
    """The fewest runs, found greedily in the given order, that copy these pieces.

    Pieces come in the order of one of the two pages. O(pieces).
    """
    runs: list[CopyRun] = []
    group: list[Piece] = []
    for piece in _joined(pieces):
        if group and not _continues(group, piece):
            runs.append(_as_run(group))
            group = []
        group.append(piece)
    if group:
        runs.append(_as_run(group))
    return tuple(runs)


def _joined(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """The pieces with neighbours on both sides made one."""
    last: Piece | None = None
    for piece in pieces:
        if last is None:
            last = piece
        elif (last.local + last.size_bytes, last.canonical + last.size_bytes) == (
            piece.local,
            piece.canonical,
        ):
            last = Piece(last.local, last.canonical, last.size_bytes + piece.size_bytes)
        else:
            yield last
            last = piece
    if last is not None:
        yield last


def _strides(first: Piece, second: Piece) -> tuple[int, int]:
    return second.local - first.local, second.canonical - first.canonical


def _continues(group: list[Piece], piece: Piece) -> bool:
    """Whether the piece is the next fragment of the run that the group makes."""
    if piece.size_bytes != group[0].size_bytes:
        return False
    strides = _strides(group[-1], piece)
    if min(strides) < piece.size_bytes:  # runs only go forward, and their fragments never overlap
        return False
    return len(group) == 1 or strides == _strides(group[0], group[1])


def _as_run(group: list[Piece]) -> CopyRun:
    first = group[0]
    size = first.size_bytes
    local_stride, canonical_stride = _strides(first, group[1]) if len(group) > 1 else (size, size)
    return CopyRun(first.local, first.canonical, size, len(group), local_stride, canonical_stride)
