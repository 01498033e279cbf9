# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from router.plan.answers import AnswerLengths
from router.plan.candidate import EXPECTED_OUTPUT_TOKENS


def test_unknown_answers_are_of_the_usual_length_and_never_longer_than_allowed() -> None:
    lengths = AnswerLengths()
    assert lengths.expect("m", None) == EXPECTED_OUTPUT_TOKENS
    assert lengths.expect("m", 8) == 8
    assert lengths.expect("m", 0) == 1


def test_mean_follows_the_answers_of_its_own_model() -> None:
    lengths = AnswerLengths()
    for _ in range(300):
        lengths.note("long", 1000)
        lengths.note("short", 10)
    assert 950 < lengths.expect("long", None) <= 1000
    assert 10 <= lengths.expect("short", None) < 15
