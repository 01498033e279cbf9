# SPDX-License-Identifier: Apache-2.0
"""Copy runs found between two page layouts: byte for byte what the layouts say, and few of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.errors import PlanRefused
from gpu_ops.layouts import Order, Origin, PageLayout, Placement, copy_runs
from gpu_ops.runs import CopyRun, Piece, canonical_end, local_end, run_bytes, runs_of, whole_page

ORDERS = st.sampled_from(Order)
PLACEMENTS = st.sampled_from(Placement)


def byte_pairs(runs: tuple[CopyRun, ...]) -> list[tuple[int, int]]:
    """(local byte, canonical byte) of everything that the runs copy."""
    return sorted(
        (
            run.local_offset + i * run.local_stride + byte,
            run.canonical_offset + i * run.canonical_stride + byte,
        )
        for run in runs
        for i in range(run.num_fragments)
        for byte in range(run.fragment_size)
    )


@given(data=st.data(), placement=PLACEMENTS, head_bytes=st.integers(1, 3))
def test_runs_copy_exactly_what_two_pages_have_in_common(
    data: st.DataObject, placement: Placement, head_bytes: int
) -> None:
    two_planes = st.sampled_from([Placement.JOINED, Placement.SPLIT])
    sizes = st.integers(1, 5)

    def page(placement: Placement) -> tuple[PageLayout, Origin]:
        layout = PageLayout(data.draw(sizes), data.draw(sizes), head_bytes, data.draw(ORDERS), placement)
        return layout, Origin(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3)))

    local, local_at = page(placement)
    canonical, canonical_at = page(placement if placement is Placement.SINGLE else data.draw(two_planes))
    expected = sorted(
        (
            local.offset(token - local_at.token, head - local_at.head, plane) + byte,
            canonical.offset(token - canonical_at.token, head - canonical_at.head, plane) + byte,
        )
        for token in range(9)
        for head in range(9)
        for plane in range(placement.planes)
        for byte in range(head_bytes)
        if 0 <= token - local_at.token < local.tokens
        and 0 <= head - local_at.head < local.heads
        and 0 <= token - canonical_at.token < canonical.tokens
        and 0 <= head - canonical_at.head < canonical.heads
    )
    if expected:
        runs = copy_runs(local, canonical, local_at, canonical_at)
        assert byte_pairs(runs) == expected
        assert all(local_end(run) <= local.page_bytes for run in runs)
        assert all(canonical_end(run) <= canonical.page_bytes for run in runs)
    else:
        with pytest.raises(PlanRefused):
            copy_runs(local, canonical, local_at, canonical_at)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4)), max_size=12),
    st.randoms(use_true_random=False),
)
def test_pieces_survive_their_grouping_into_runs(gaps: list[tuple[int, int, int]], random: object) -> None:
    pieces, local, canonical = [], 0, 0
    for local_gap, canonical_gap, size in gaps:
        local, canonical = local + local_gap, canonical + canonical_gap
        pieces.append(Piece(local, canonical, size))
        local, canonical = local + size, canonical + size
    random.shuffle(pieces)  # type: ignore[attr-defined]
    expected = sorted((p.local + i, p.canonical + i) for p in pieces for i in range(p.size_bytes))
    assert byte_pairs(runs_of(pieces)) == expected


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("placement", Placement)
def test_a_page_to_its_like_is_one_copy(order: Order, placement: Placement) -> None:
    layout = PageLayout(16, 8, 256, order, placement)
    assert copy_runs(layout, layout) == (whole_page(layout.page_bytes),)


def test_a_shard_of_token_major_pages_is_one_run_with_a_fragment_per_token() -> None:
    full, shard = PageLayout(16, 8, 256), PageLayout(16, 2, 256)
    (run,) = copy_runs(shard, full, Origin(head=4), Origin())
    assert run == CopyRun(0, 4 * 256, 2 * 256, 2 * 16, 2 * 256, 8 * 256)


def test_a_shard_of_head_major_pages_is_one_fragment_per_plane() -> None:
    full, shard = PageLayout(16, 8, 256, Order.HND), PageLayout(16, 2, 256, Order.HND)
    (run,) = copy_runs(shard, full, Origin(head=4), Origin())
    assert (run.num_fragments, run.fragment_size, run_bytes(run)) == (2, 16 * 2 * 256, shard.page_bytes)


def test_between_token_major_and_head_major_there_is_one_run_per_head_or_token() -> None:
    """Not one per token and head: the launch's tables stay short."""
    for tokens, heads in ((16, 8), (8, 64)):
        runs = copy_runs(PageLayout(tokens, heads, 64), PageLayout(tokens, heads, 64, Order.HND))
        assert len(runs) <= 2 * min(tokens, heads) + 1


def test_pages_with_nothing_in_common_are_refused() -> None:
    page = PageLayout(16, 2, 64)
    with pytest.raises(PlanRefused, match="no token and head in common"):
        copy_runs(page, page, Origin(head=2), Origin(head=0))
    with pytest.raises(PlanRefused, match="same kind"):
        copy_runs(page, PageLayout(16, 2, 128))
    with pytest.raises(PlanRefused, match="same kind"):
        copy_runs(page, PageLayout(16, 2, 64, placement=Placement.SINGLE))
    with pytest.raises(PlanRefused, match="at least one"):
        PageLayout(0, 2, 64)
