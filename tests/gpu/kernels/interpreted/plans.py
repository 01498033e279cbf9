# SPDX-License-Identifier: Apache-2.0
"""Random plans and moves. Segments never overlap on either side, whatever their widths and gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from gpu_ops.moves import Moves, page_moves
from gpu_ops.plan import PagePlan, Segment
from gpu_ops.runs import CopyRun, canonical_end, local_end


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of pages inside a larger buffer, so that a write outside of them is seen."""

    buffer: torch.Tensor
    rows: torch.Tensor

    def copy(self) -> Rows:
        buffer = self.buffer.clone()
        rows = buffer.as_strided(self.rows.shape, self.rows.stride(), self.rows.storage_offset())
        return Rows(buffer, rows)


def random_rows(count: int, row_bytes: int, gap_bytes: int, first_byte: int, seed: int) -> Rows:
    stride = row_bytes + gap_bytes
    random = torch.Generator().manual_seed(seed)
    buffer = torch.randint(-128, 128, (first_byte + count * stride + 16,), dtype=torch.int8, generator=random)
    # The allocator aligns to 64 bytes; `first_byte` then decides the alignment of the rows.
    return Rows(buffer, buffer.as_strided((count, row_bytes), (stride, 1), first_byte))


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Both sides' memory, the plan's fixed part, and moves."""

    host: tuple[Rows, ...]
    device: tuple[Rows, ...]
    pages_per_chunk: int
    sets: tuple[tuple[Segment, ...], ...]
    moves: Moves

    def fresh(self) -> tuple[PagePlan, list[torch.Tensor]]:
        """A plan over copies of the memory, and the buffers to compare afterwards."""
        host, device = [one.copy() for one in self.host], [one.copy() for one in self.device]
        plan = PagePlan(
            tuple(one.rows for one in host),
            tuple(one.rows for one in device),
            self.pages_per_chunk,
            self.sets,
        )
        return plan, [one.buffer for one in (*host, *device)]


@st.composite
def run_lists(draw: st.DrawFn, unit: int) -> list[CopyRun]:
    """Runs that tile parts of two pages: in order on the local page, shuffled on the canonical one."""
    drawn = draw(
        st.lists(
            st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(0, 2), st.integers(0, 2)),
            min_size=1,
            max_size=4,
        )
    )
    order = draw(st.permutations(range(len(drawn))))
    canonical_at: dict[int, int] = {}
    end = draw(st.integers(0, 2)) * unit
    for index in order:
        words, fragments, _, gap = drawn[index]
        canonical_at[index] = end
        end += fragments * (words + gap) * unit
    runs, local_end_bytes = [], 0
    for index, (words, fragments, local_gap, canonical_gap) in enumerate(drawn):
        runs.append(
            CopyRun(
                local_end_bytes,
                canonical_at[index],
                words * unit,
                fragments,
                (words + local_gap) * unit,
                (words + canonical_gap) * unit,
            )
        )
        local_end_bytes += fragments * (words + local_gap) * unit
    return runs


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tensors = draw(st.integers(1, 3))
    pages_per_chunk = draw(st.integers(1, 3))
    units = [draw(st.sampled_from([16, 16, 4, 1])) for _ in range(tensors)]
    run_sets = [
        [(tensor, run) for tensor in range(tensors) for run in draw(run_lists(units[tensor]))]
        for _ in range(draw(st.integers(1, 2)))
    ]
    writers = draw(st.integers(1, 3))
    writer = draw(st.integers(0, writers - 1))
    sets = tuple(
        tuple(Segment(tensor, tensor, run, writers, writer) for tensor, run in runs) for runs in run_sets
    )
    chunks, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 8))

    def rows(count: int, ends: Sequence[int], unit: int, pages: int) -> Rows:
        page_bytes = -(-max(ends) // unit) * unit
        gap, first = draw(st.integers(0, 2)) * unit, draw(st.integers(0, 2)) * unit
        return random_rows(count, page_bytes * pages, gap, first, draw(st.integers(0, 2**31)))

    def ends(tensor: int, *, canonical: bool) -> list[int]:
        end = canonical_end if canonical else local_end
        return [end(run) for runs in run_sets for index, run in runs if index == tensor]

    host = [rows(chunks, ends(i, canonical=True), unit, pages_per_chunk) for i, unit in enumerate(units)]
    device = [rows(blocks, ends(i, canonical=False), unit, 1) for i, unit in enumerate(units)]
    count = draw(st.integers(0, min(chunks * pages_per_chunk, blocks)))
    moves = page_moves(
        draw(st.permutations(range(chunks * pages_per_chunk)))[:count],
        draw(st.permutations(range(blocks)))[:count],
        [draw(st.integers(0, len(sets) - 1)) for _ in range(count)],
    )
    return Case(tuple(host), tuple(device), pages_per_chunk, sets, moves)
