# SPDX-License-Identifier: Apache-2.0
"""States by key: each follower hears the last one of each, and everything at first."""

from __future__ import annotations

import msgspec

from router.processes.published import Published

A, B = ("worker", "a"), ("worker", "b")


def values(entries: object) -> dict[tuple[str, ...], object]:
    return {e.key: None if e.value is None else msgspec.msgpack.decode(e.value) for e in entries}  # type: ignore[attr-defined]


def test_a_follower_hears_everything_first_and_then_the_last_state_of_what_changed() -> None:
    published = Published()
    published.tell([(A, 1), (B, 1)])
    woken: list[int] = []
    audience = published.follow(lambda: woken.append(1))
    whole, entries = audience.take()
    assert (whole, values(entries)) == (True, {A: 1, B: 1})
    assert not audience.is_due
    published.tell([(A, 2)])
    published.tell([(A, 3), (B, None)])
    assert audience.is_due
    assert len(woken) == 2
    whole, entries = audience.take()
    assert (whole, values(entries)) == (False, {A: 3, B: None})


def test_the_first_telling_is_due_even_if_there_is_nothing() -> None:
    audience = Published().follow(lambda: None)
    assert audience.is_due
    assert audience.take() == (True, [])
    assert not audience.is_due


def test_what_was_never_there_is_not_told_as_gone_and_who_left_is_told_nothing() -> None:
    published = Published()
    audience = published.follow(lambda: None)
    audience.take()
    published.tell([(A, None)])
    assert not audience.is_due
    published.leave(audience)
    published.tell([(A, 1)])
    assert not audience.is_due
