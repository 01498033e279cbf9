# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from engine_ext.vllm.storage.lookups import Lookups, Verdict


def test_a_question_is_sent_once_and_answered_for_all_who_ask() -> None:
    lookups = Lookups(1.0)
    assert lookups.ask(b"k", "r", 0.0, known=False) is Verdict.WAIT
    assert lookups.ask(b"k", "s", 0.1, known=False) is Verdict.WAIT
    assert lookups.take_unsent() == [b"k"]
    assert lookups.take_unsent() == []
    lookups.answer(b"k", found=True)
    assert lookups.ask(b"k", "r", 0.2, known=False) is Verdict.HIT
    assert lookups.ask(b"k", "s", 0.2, known=False) is Verdict.HIT


def test_what_was_seen_recently_needs_no_question() -> None:
    lookups = Lookups(1.0)
    assert lookups.ask(b"k", "r", 0.0, known=True) is Verdict.HIT
    assert lookups.take_unsent() == []


def test_no_answer_in_time_is_a_miss_and_a_late_answer_changes_nothing() -> None:
    lookups = Lookups(1.0)
    lookups.ask(b"k", "r", 0.0, known=False)
    assert lookups.ask(b"k", "r", 1.0, known=False) is Verdict.WAIT
    assert lookups.ask(b"k", "r", 1.1, known=False) is Verdict.MISS
    lookups.answer(b"k", found=True)
    assert lookups.ask(b"k", "r", 1.2, known=False) is Verdict.MISS


def test_a_load_that_failed_is_not_tried_again_for_the_request_that_saw_it() -> None:
    lookups = Lookups(1.0)
    assert lookups.ask(b"k", "r", 0.0, known=True) is Verdict.HIT
    lookups.settle(b"k", found=False)
    assert lookups.ask(b"k", "r", 0.1, known=True) is Verdict.MISS
    assert lookups.ask(b"k", "s", 0.2, known=False) is Verdict.WAIT, "another request asks anew"
    assert lookups.take_unsent() == [b"k"]


def test_a_store_turns_a_miss_into_a_hit() -> None:
    lookups = Lookups(1.0)
    lookups.ask(b"k", "r", 0.0, known=False)
    lookups.answer(b"k", found=False)
    lookups.settle(b"k", found=True)
    assert lookups.ask(b"k", "r", 0.1, known=False) is Verdict.HIT


def test_nothing_is_left_of_requests_that_ended() -> None:
    lookups = Lookups(1.0)
    for request in ("r", "s"):
        for key in (b"k", b"l"):
            lookups.ask(key, request, 0.0, known=False)
    lookups.forget("r")
    assert len(lookups) == 2
    lookups.forget("s")
    lookups.forget("never asked")
    assert len(lookups) == 0
    assert lookups.take_unsent() == [], "nobody waits for an answer"
    lookups.answer(b"k", found=True)
    assert len(lookups) == 0
