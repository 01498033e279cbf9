# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from random import Random

from router.plan.tails import LEAST_REQUESTS, LEFT_ALONE, TailReuse


def caps(reuse: TailReuse, kind: str, draws: int = 400) -> list[int | None]:
    random = Random(1)
    return [reuse.shared_tokens(kind, random) for _ in range(draws)]


def test_tails_behind_a_shared_system_prompt_are_left_out() -> None:
    reuse = TailReuse()
    reuse.note("batch", 0)
    for _ in range(LEAST_REQUESTS):
        reuse.note("batch", 40)
    found = caps(reuse, "batch")
    assert set(found) == {40, None}
    assert abs(found.count(None) / len(found) - LEFT_ALONE) < 0.03


def test_nothing_is_concluded_from_few_requests() -> None:
    reuse = TailReuse()
    for _ in range(LEAST_REQUESTS - 1):
        reuse.note("batch", 40)
    assert set(caps(reuse, "batch")) == {None}


def test_conversations_keep_their_tails() -> None:
    reuse = TailReuse()
    for number in range(2000):
        reuse.note("chat", 40 if number % 20 else 40 + number)
    assert set(caps(reuse, "chat")) == {None}


def test_other_kinds_are_not_touched() -> None:
    reuse = TailReuse()
    for number in range(1000):
        reuse.note("batch", 40)
        reuse.note("chat", number)
    assert set(caps(reuse, "chat")) == {None}
    assert 40 in caps(reuse, "batch")
    assert set(caps(reuse, "unheard of")) == {None}


def test_tails_that_are_read_again_from_some_day_on_are_kept_again() -> None:
    reuse = TailReuse()
    for _ in range(5000):
        reuse.note("batch", 40)
    for number in range(60):
        reuse.note("batch", 41 + number)
    assert set(caps(reuse, "batch")) == {None}


def test_unique_prompts_are_not_offloaded_at_all() -> None:
    reuse = TailReuse()
    for _ in range(LEAST_REQUESTS):
        reuse.note("unique", 0)
    assert 0 in caps(reuse, "unique")
