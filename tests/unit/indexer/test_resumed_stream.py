# SPDX-License-Identifier: Apache-2.0
"""A stream that goes on behind what is known from before: only the same process may add to it."""

from __future__ import annotations

import pytest

from indexer.stream import (
    Action,
    Apply,
    ClearSuspect,
    EventStream,
    MarkPartial,
    MarkSuspect,
    NewIncarnation,
    RequestReplay,
    StreamPosition,
)


def body(seq: int, process: str = "a") -> bytes:
    return f"{process}{seq}".encode()


def position(batches: int) -> StreamPosition:
    """Of a stream that has applied so many."""
    stream = EventStream(has_replay=False)
    stream.connected(0.0)
    stream.process_started(100.0, 0.0)
    for seq in range(batches):
        stream.live(seq, body(seq), 0.0)
    found = stream.position()
    assert found is not None
    return found


def resumed(batches: int = 5, *, has_replay: bool = True) -> EventStream:
    return EventStream(has_replay=has_replay, resume=position(batches))


def replay(stream: EventStream, start: int, end: int, process: str = "a") -> list[Action]:
    actions = []
    for seq in range(start, end):
        actions += stream.replayed(seq, body(seq, process), 0.0)
    return actions + stream.replay_ended(0.0)


def applied(actions: list[Action]) -> list[int]:
    return [action.seq for action in actions if isinstance(action, Apply)]


def kinds(actions: list[Action]) -> set[type]:
    return {type(action) for action in actions}


def test_it_asks_for_its_last_batch_and_applies_what_follows() -> None:
    stream = resumed()
    assert stream.connected(0.0) == [RequestReplay(4)]
    actions = replay(stream, 4, 8)
    assert (applied(actions), kinds(actions)) == ([5, 6, 7], {Apply})


def test_nothing_new_in_the_replay_is_the_same_process() -> None:
    stream = resumed()
    stream.connected(0.0)
    assert replay(stream, 4, 5) == []
    assert applied(stream.live(5, body(5), 0.0)) == [5]


@pytest.mark.parametrize(("start", "end", "process"), [(4, 5, "b"), (0, 0, "b"), (6, 7, "a")])
def test_another_process_or_one_that_cannot_prove_itself_starts_over(
    start: int, end: int, process: str
) -> None:
    stream = resumed()
    stream.connected(0.0)
    actions = replay(stream, start, end, process)
    assert NewIncarnation in kinds(actions)
    assert RequestReplay(0) in actions
    assert applied(actions) == []


@pytest.mark.parametrize("has_replay", [True, False])
def test_a_live_batch_that_we_have_already_is_of_another_process(has_replay: bool) -> None:
    stream = resumed(has_replay=has_replay)
    stream.connected(0.0)
    assert NewIncarnation in kinds(stream.live(3, body(3, "b"), 0.0))


def test_without_replay_it_is_suspect_until_the_start_time_is_the_recorded_one() -> None:
    stream = resumed(has_replay=False)
    assert kinds(stream.connected(0.0)) == {MarkSuspect}
    assert stream.process_started(100.0, 0.0) == [ClearSuspect()]


def test_without_replay_another_start_time_is_another_process() -> None:
    stream = resumed(has_replay=False)
    stream.connected(0.0)
    assert kinds(stream.process_started(101.0, 0.0)) == {NewIncarnation}


def test_without_replay_what_was_missed_makes_the_holder_partial() -> None:
    stream = resumed(has_replay=False)
    stream.connected(0.0)
    actions = stream.live(9, body(9), 0.0)
    assert (applied(actions), kinds(actions)) == ([9], {MarkPartial, Apply})


def test_a_failed_replay_leaves_the_map_suspect_and_partial() -> None:
    stream = resumed()
    stream.connected(0.0)
    assert kinds(stream.replay_failed("nobody there", 0.0)) == {MarkSuspect, MarkPartial}


def test_a_stream_that_has_applied_nothing_or_is_suspect_has_no_position() -> None:
    stream = EventStream(has_replay=False)
    assert stream.position() is None
    stream.connected(0.0)
    stream.live(0, body(0), 0.0)
    assert stream.position() is not None
    stream.disconnected()
    stream.connected(0.0)
    assert stream.position() is None
