# SPDX-License-Identifier: Apache-2.0
"""The figures in the comments are those of Mooncake's conversation trace."""

from __future__ import annotations

import statistics

import pytest

from router.replay.generator import TraceShape, generate_rows
from router.replay.traces import TraceRow, requests_from_rows

HOUR_S = 3537.0


@pytest.fixture(scope="module")
def rows() -> list[TraceRow]:
    return generate_rows(1, HOUR_S)


def shared_blocks(rows: list[TraceRow]) -> list[int]:
    """Per request, leading blocks that an endless cache holds already."""
    seen: set[int] = set()
    shared: list[int] = []
    for row in rows:
        count = next((i for i, block in enumerate(row.hash_ids) if block not in seen), len(row.hash_ids))
        shared.append(count)
        seen.update(row.hash_ids)
    return shared


def test_arrivals_and_lengths_have_the_shape_of_the_recorded_trace(rows: list[TraceRow]) -> None:
    inputs, outputs = [row.input_length for row in rows], [row.output_length for row in rows]
    assert len(rows) / HOUR_S == pytest.approx(3.4, rel=0.1)
    assert statistics.median(inputs) == pytest.approx(6909, rel=0.15)
    assert statistics.mean(inputs) == pytest.approx(12035, rel=0.15)
    assert statistics.quantiles(inputs, n=100)[98] == pytest.approx(85401, rel=0.25)
    assert max(inputs) <= 126195
    assert statistics.median(outputs) == pytest.approx(350, rel=0.1)
    assert statistics.mean(outputs) == pytest.approx(343, rel=0.1)


def test_every_request_starts_with_block_0_and_three_in_five_share_no_more(rows: list[TraceRow]) -> None:
    assert all(row.hash_ids[0] == 0 for row in rows)
    shared = shared_blocks(rows)
    assert sum(count <= 1 for count in shared) / len(rows) == pytest.approx(0.61, abs=0.04)
    reuse = sum(shared) / sum(len(row.hash_ids) for row in rows)
    assert reuse == pytest.approx(0.37, abs=0.08)
    assert statistics.median(count for count in shared if count > 1) == pytest.approx(12, abs=3)


def test_blocks_cover_the_prompt_and_a_later_turn_repeats_only_full_ones(rows: list[TraceRow]) -> None:
    assert all(len(row.hash_ids) == -(-row.input_length // 512) for row in rows)
    owner: dict[int, TraceRow] = {}
    for row in rows:
        for place, block in enumerate(row.hash_ids):
            earlier = owner.setdefault(block, row)
            if earlier is not row:
                assert earlier.hash_ids[: place + 1] == row.hash_ids[: place + 1]
                assert (place + 1) * 512 <= earlier.input_length
        for block in row.hash_ids:
            owner[block] = row


def test_arrivals_are_binned_and_in_order(rows: list[TraceRow]) -> None:
    stamps = [row.timestamp for row in rows]
    assert stamps == sorted(stamps)
    assert all(stamp % 3000 == 0 for stamp in stamps)
    arrivals = [request.arrival_s for request in requests_from_rows(rows)]
    assert arrivals == sorted(arrivals)


def test_a_seed_gives_one_trace() -> None:
    assert generate_rows(7, 60) == generate_rows(7, 60)
    assert generate_rows(7, 60) != generate_rows(8, 60)
    doubled = generate_rows(7, 600, TraceShape(rate_per_s=6.8))
    assert len(doubled) > 1.6 * len(generate_rows(7, 600))
