# SPDX-License-Identifier: Apache-2.0
"""One load board for the processes of a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from router.plan.native_board import NativeLoadBoard

HAMMER = Path(__file__).parents[3] / "support" / "board_hammer.py"
KILLS = 40


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "board")


def in_another_process(path: str, *lines: str) -> str:
    """What a process prints that has opened ``board``."""
    opening = ("import os, signal", "from router.plan.native_board import NativeLoadBoard")
    program = "\n".join((*opening, f"board = NativeLoadBoard({path!r})", *lines))
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True, check=False
    )
    return done.stdout.strip()


DIES = "os.kill(os.getpid(), signal.SIGKILL)"


def test_what_one_process_promises_the_others_see(path: str) -> None:
    board = NativeLoadBoard(path)
    board.promise(
        "other", 0, 1.0, 1.0, 0.0
    )  # numbers differ from the order in which the other one names workers
    ticket = board.promise("w", 1, 2.0, 2.0, 10.0, ["source"], prompt_tokens=7)
    read = 'print(board.queue_s("w", 1, 10.5), board.active_tokens("w", 1), *board.sessions("w"))'
    assert in_another_process(path, read) == "1.5 7 source"
    board.release(ticket, 11.0)
    assert in_another_process(path, 'print(board.in_flight("w"), board.in_flight("other"))') == "0 1"


def test_what_a_killed_process_left_open_is_ended_by_another(path: str) -> None:
    board = NativeLoadBoard(path)
    ours = board.promise("w", 0, 1.0, 1.0, 0.0)
    in_another_process(
        path, 'board.promise("w", 0, 5.0, 5.0, 0.0, ["s"]); board.promise("theirs", 0, 1, 1, 0.0)', DIES
    )
    assert (board.in_flight("w"), board.pulls("s"), board.in_flight("theirs")) == (2, 1.0, 1)
    assert board.reap(1.0) == 2
    assert (board.in_flight("w"), board.pulls("s"), board.in_flight("theirs")) == (1, 0.0, 0)
    board.release(ours, 2.0)
    assert board.queue_s("w", 0, 2.0) == 0.0
    assert board.reap(3.0) == 0
    assert board.core.find_worker("theirs") is None, "nobody knows it any more, so its number is free"


def test_a_process_that_dies_with_the_lock_blocks_nobody(path: str) -> None:
    board = NativeLoadBoard(path)
    ours = board.promise("w", 0, 1.0, 1.0, 0.0, ["s"])
    in_another_process(path, 'board.promise("w", 0, 2.0, 2.0, 0.0)', "board.core.hang()", DIES)
    assert board.queue_s("w", 0, 0.0) == 3.0
    assert board.core.repairs == 1
    assert board.core.consistent()
    assert board.reap(1.0) == 1
    board.first_token(ours, 1.0)
    assert (board.decodes("w", 0, 1.0), board.pulls("s"), board.queue_s("w", 0, 1.0)) == (1, 0.0, 0.0)


def test_an_orderly_end_releases_what_is_open(path: str) -> None:
    board = NativeLoadBoard(path)
    in_another_process(path, 'board.promise("w", 0, 2.0, 2.0, 0.0)', "board.close(1.0)")
    assert board.in_flight("w") == 0


def test_a_file_that_no_living_process_has_is_made_anew(path: str) -> None:
    in_another_process(path, 'board.promise("w", 0, 2.0, 2.0, 0.0, ["s"])', "board.core.hang()", DIES)
    board = NativeLoadBoard(path)
    assert (board.in_flight("w"), board.core.repairs) == (0, 0)
    assert not board.sessions("w")
    board.release(board.promise("w", 0, 2.0, 2.0, 0.0), 1.0)
    assert board.core.consistent()


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "board"
    file.write_bytes(b"something else")
    with pytest.raises(OSError, match="no load board of this version"):
        NativeLoadBoard(file)
    assert file.read_bytes() == b"something else"
    with pytest.raises(OSError, match="nowhere"):
        NativeLoadBoard(tmp_path / "nowhere" / "board")


def test_a_board_may_lie_in_an_inherited_memfd() -> None:
    fd = os.memfd_create("board")
    try:
        board = NativeLoadBoard(f"/proc/self/fd/{fd}")
        board.promise("w", 0, 1.0, 1.0, 0.0)
        program = (
            "from router.plan.native_board import NativeLoadBoard\n"
            f"print(NativeLoadBoard('/proc/self/fd/{fd}').in_flight('w'))"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            pass_fds=[fd],
        )
        assert done.stdout.strip() == "1"
    finally:
        os.close(fd)


def test_a_number_stays_while_another_process_needs_it(path: str) -> None:
    board, other = NativeLoadBoard(path), NativeLoadBoard(path)
    number = board.hold("w")
    assert other.hold("w") == number
    board.drop("w")
    board.forget("w")
    assert other.core.name(number) == "w"
    assert board.core.hold_worker("new") != number
    other.drop("w")
    other.forget("w")
    assert board.core.hold_worker("newer") == number


def test_each_process_has_its_own_intervals_between_samples(path: str) -> None:
    """A gauge that one of them reads may be older than the newest sample of another."""
    board, other = NativeLoadBoard(path), NativeLoadBoard(path)
    for each in (board, other):
        each.sampled("w", 0, 0, 0.0)
    ticket = board.promise("w", 0, 1.0, 1.0, 0.0)
    board.release(ticket, 1.0)
    board.sampled("w", 0, 0, 1.0)
    other.sampled("w", 1, 0, 1.1)  # read while the request was there
    assert board.decodes("w", 0, 1.2) == 0


def test_a_full_board_counts_no_more_and_goes_on() -> None:
    board = NativeLoadBoard()
    tickets = [board.core.promise(board.hold("w"), 0, 1.0, 1.0, 0.0, [], True, 1, 1) for _ in range(131_073)]
    assert tickets[-1] == 0
    assert (board.overflows, board.in_flight("w")) == (1, 131_072)
    board.first_token(0, 1.0)
    board.release(0, 1.0)
    board.release(tickets[0], 1.0)
    assert board.promise("w", 0, 1.0, 1.0, 1.0) != 0


def test_processes_killed_at_any_moment_leave_a_sound_board(path: str) -> None:
    done = subprocess.run(
        [sys.executable, HAMMER, path, str(KILLS), "1"], stdout=subprocess.PIPE, check=True, timeout=600
    )
    seen = json.loads(done.stdout)
    assert min(seen["steps"]) > 0, "those that lived went on"
    assert seen["repairs"] >= KILLS // 4, "every fourth died with the lock"
    assert seen["reaped"] >= KILLS, "all had promises open"
    assert seen["left"] == seen["reaped_last"], "and the last two ended without a word"
    assert seen["consistent"]
    for name in ("in_flight", "pulls", "queue_s", "decodes", "active_tokens"):
        assert not any(seen[name]), name
