# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from router.replay.sessions import is_session_file, load_sessions
from router.replay.traces import TraceError, prompt_tokens

BLOCK = 64


def one(t: float, tokens: int, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "s", "in": tokens, "out": 5, "api_time": 1.0, **more}


def session(*requests: dict[str, Any], shared_blocks: int = 4) -> dict[str, Any]:
    tools = {"tool_tokens": shared_blocks * BLOCK, "system_tokens": shared_blocks * BLOCK}
    return {"id": "x", "block_size": BLOCK, **tools, "requests": list(requests)}


def written(folder: Path, *sessions: dict[str, Any]) -> Path:
    path = folder / "sessions.jsonl.gz"
    path.write_bytes(gzip.compress(("\n".join(map(json.dumps, sessions)) + "\n\n").encode()))
    return path


def shared_tokens(path: Path, i: int, j: int) -> int:
    requests = load_sessions(path, 0.001, 0)
    pairs = zip(prompt_tokens(requests[i]), prompt_tokens(requests[j]), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), -1)


def test_runs_of_ids_are_the_lists_they_stand_for(tmp_path: Path) -> None:
    listed = written(tmp_path, session(one(0.0, 6 * BLOCK + 1, hash_ids=[1, 2, 3, 8, 9, 4])))
    expected = load_sessions(listed, 1.0, 0)
    runs = written(tmp_path, session(one(0.0, 6 * BLOCK + 1, hash_runs=[[1, 3], [8, 2], [4, 1]])))
    assert load_sessions(runs, 1.0, 0) == expected


def test_half_of_tools_and_system_prompt_is_common_to_all_sessions(tmp_path: Path) -> None:
    ids = list(range(1, 11))
    path = written(tmp_path, *[session(one(0.0, 10 * BLOCK, hash_ids=ids)) for _ in range(2)])
    assert shared_tokens(path, 0, 1) == 4 * BLOCK


def test_a_request_with_another_beginning_shares_nothing(tmp_path: Path) -> None:
    other = [1, 50, *range(60, 68)]
    path = written(
        tmp_path,
        session(one(0.0, 10 * BLOCK, hash_ids=list(range(1, 11))), one(5.0, 10 * BLOCK, hash_ids=other)),
    )
    assert shared_tokens(path, 0, 1) == BLOCK


def test_turns_of_a_session_share_what_was_recorded(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        session(
            one(0.0, 6 * BLOCK, hash_runs=[[1, 6]]),
            one(9.0, 8 * BLOCK, hash_runs=[[1, 6], [20, 2]]),
        ),
    )
    requests = load_sessions(path, 1.0, 0)
    assert [request.arrival_s for request in requests] == [0.0, 9.0]
    assert requests[1].block_ids[:6] == requests[0].block_ids
    assert [request.index for request in requests] == [0, 1]


def test_a_subagent_has_a_beginning_of_its_own(tmp_path: Path) -> None:
    nested = {
        "t": 100.0,
        "type": "subagent",
        "tool_tokens": 2 * BLOCK,
        "system_tokens": 0,
        "requests": [one(3.0, 3 * BLOCK, hash_ids=[7, 8, 9])],
    }
    path = written(tmp_path, session(one(0.0, 3 * BLOCK, hash_ids=[1, 2, 3]), nested))
    main, sub = load_sessions(path, 1.0, 0)
    assert sub.arrival_s == 103.0
    assert not set(main.block_ids) & set(sub.block_ids)


def test_sessions_begin_at_the_rate_asked_for_and_equally_for_equal_seeds(tmp_path: Path) -> None:
    path = written(tmp_path, *[session(one(0.0, BLOCK, hash_ids=[1])) for _ in range(400)])
    arrivals = [request.arrival_s for request in load_sessions(path, 2.0, 5)]
    assert arrivals[-1] == pytest.approx(200, rel=0.2)
    assert arrivals == [request.arrival_s for request in load_sessions(path, 2.0, 5)]
    assert arrivals != [request.arrival_s for request in load_sessions(path, 2.0, 6)]
    assert len(load_sessions(path, 2.0, 5, limit=7)) == 7


def test_files_are_told_apart_by_their_first_line(tmp_path: Path) -> None:
    assert is_session_file(written(tmp_path, session(one(0.0, BLOCK, hash_ids=[1]))))
    for text in ("", "{", "[]", '{"timestamp": 0}'):
        (tmp_path / "other.jsonl").write_text(text)
        assert not is_session_file(tmp_path / "other.jsonl")
    assert not is_session_file(tmp_path / "none")


def test_what_is_no_session_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gz:2"):
        load_sessions(written(tmp_path, session(), {"requests": 3}), 1.0, 0)
    with pytest.raises(TraceError, match="0 block ids for 64"):
        load_sessions(written(tmp_path, session(one(0.0, BLOCK))), 1.0, 0)
