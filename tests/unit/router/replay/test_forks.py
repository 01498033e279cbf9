# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from router.replay.forks import ForkError, ask_copies

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def test_answers_come_in_the_order_of_the_questions() -> None:
    answers = ask_copies([partial(float, number) for number in range(20)], at_once=3)
    assert answers == [float(number) for number in range(20)]


def test_what_a_question_changes_is_lost_with_its_copy() -> None:
    changed: list[int] = []

    def question() -> float:
        changed.append(1)
        return float(len(changed))

    assert ask_copies([question, question], at_once=1) == [1.0, 1.0]
    assert not changed


def test_no_more_copies_live_at_once_than_asked_for(tmp_path: Path) -> None:
    def alive() -> float:
        mine = tmp_path / str(os.getpid())
        mine.touch()
        seen = len(list(tmp_path.iterdir()))
        # The oldest copy is collected before the next is made, so its file is gone by then.
        mine.unlink()
        return float(seen)

    assert max(ask_copies([alive] * 12, at_once=2)) <= 2


def test_a_question_that_fails_is_an_error_that_says_why_and_leaves_no_pipe_open(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fails() -> float:
        raise ValueError("no answer")

    before = os.listdir("/proc/self/fd")
    with pytest.raises(ForkError, match="status 1"):
        ask_copies([fails, partial(float, 1), partial(float, 2)], at_once=3)
    assert os.listdir("/proc/self/fd") == before
    assert "no answer" in capfd.readouterr().err


def test_a_copy_that_is_killed_is_an_error() -> None:
    def dies() -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    with pytest.raises(ForkError, match="status -9"):
        ask_copies([dies], at_once=1)
