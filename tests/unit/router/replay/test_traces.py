# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from router.replay.traces import TraceError, TraceRow, load_trace, prompt_tokens, requests_from_rows

ROWS = [
    {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 1024, "output_length": 0, "hash_ids": [0, 1]},
    {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]},
    {"timestamp": 3000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 6001, "input_length": 10, "output_length": 1, "hash_ids": [9]},
]


def written(folder: Path, name: str = "t.jsonl", rows: Sequence[object] = ROWS) -> Path:
    text = "\n".join(json.dumps(row) for row in rows).encode()
    path = folder / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_trace_file_is_read_plain_or_gzipped(tmp_path: Path, name: str) -> None:
    requests = load_trace(written(tmp_path, name))
    assert [request.input_tokens for request in requests] == [1030, 1024, 600, 1030, 10]
    assert requests[0].block_ids == (0, 1, 2)
    assert [request.full_blocks for request in requests] == [2, 2, 1, 2, 0]
    assert requests[1].output_tokens == 1  # a request ends with at least one token
    assert [request.index for request in requests] == list(range(5))


def test_requests_of_one_instant_are_spread_until_the_next_one(tmp_path: Path) -> None:
    arrivals = [request.arrival_s for request in load_trace(written(tmp_path))]
    assert arrivals == pytest.approx([0.0, 1.0, 2.0, 3.0, 6.001])
    assert arrivals == sorted(arrivals)


def test_a_limit_changes_no_arrival(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert load_trace(path, limit=3) == load_trace(path)[:3]
    assert load_trace(path, limit=0) == []


def test_equal_blocks_have_equal_tokens_and_partial_ones_never_do(tmp_path: Path) -> None:
    first, second, third, again, last = (prompt_tokens(request) for request in load_trace(written(tmp_path)))
    assert [len(ids) for ids in (first, second, third, again, last)] == [1030, 1024, 600, 1030, 10]
    assert first[:1024] == second == again[:1024]
    assert third[:512] == first[:512]
    assert third[512:518] != first[512:518]
    assert first[1024:] != again[1024:]
    assert first[512:1024] != first[:512]
    assert max(first) < 2**17
    assert len(set(first[:512])) > 400


def test_expansion_is_the_same_in_every_process(tmp_path: Path) -> None:
    (request, *_) = load_trace(written(tmp_path))
    assert prompt_tokens(request)[:3].tolist() == prompt_tokens(request)[:3].tolist()
    assert prompt_tokens(request)[:4].tolist() == FIRST_TOKENS_OF_BLOCK_0


FIRST_TOKENS_OF_BLOCK_0 = [12750, 122826, 76823, 29482]


@pytest.mark.parametrize(
    "row",
    [
        {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []},
        {"timestamp": 0, "input_length": "x", "output_length": 5, "hash_ids": []},
        {"timestamp": 0},
        [],
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object) -> None:
    with pytest.raises(TraceError, match=r"t\.jsonl:6"):
        load_trace(written(tmp_path, rows=[*ROWS, row]))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="none"):
        load_trace(tmp_path / "none.jsonl")
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(TraceError, match="broken"):
        load_trace(broken)


def test_no_rows_give_no_requests() -> None:
    assert requests_from_rows([]) == []
    (only,) = requests_from_rows([TraceRow(timestamp=500, input_length=1, output_length=1, hash_ids=[4])])
    assert only.arrival_s == 0.5
