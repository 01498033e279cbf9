# SPDX-License-Identifier: Apache-2.0
"""Who is hung: a process that does not answer while its asker is awake."""

from __future__ import annotations

from router.processes.heartbeat import Heartbeat


def test_one_that_answers_is_asked_again_and_again() -> None:
    beat = Heartbeat(10.0)
    for second in range(100):
        number = beat.tick(float(second))
        assert number == second + 1
        beat.heard(number)
        assert not beat.is_hung


def test_one_that_does_not_answer_is_asked_once_and_hung_after_the_limit() -> None:
    beat = Heartbeat(10.0)
    asked = [beat.tick(float(second)) for second in range(10)]
    assert asked == [1, *[None] * 9]
    assert (beat.silent_s, beat.is_hung) == (9.0, False)
    beat.tick(10.0)
    assert beat.is_hung


def test_a_late_answer_counts() -> None:
    beat = Heartbeat(10.0)
    for second in range(9):
        beat.tick(float(second))
    beat.heard(1)
    assert beat.silent_s == 0.0
    assert beat.tick(9.0) == 2


def test_time_in_which_the_asker_slept_does_not_count() -> None:
    beat = Heartbeat(10.0)
    beat.tick(0.0)
    beat.tick(3600.0)
    assert beat.silent_s == 2.0
    assert not beat.is_hung


def test_a_short_limit_is_looked_at_often_enough() -> None:
    assert Heartbeat(0.4).period_s == 0.1
    assert Heartbeat(30.0).period_s == 1.0
