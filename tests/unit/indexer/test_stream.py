# SPDX-License-Identifier: Apache-2.0
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
    StreamState,
)


def applied(actions: list[Action]) -> list[int]:
    return [action.seq for action in actions if isinstance(action, Apply)]


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def body(seq: int, process: str = "a") -> bytes:
    return f"{process}{seq}".encode()


def replay(stream: EventStream, start: int, end: int, process: str = "a", now_s: float = 0.0) -> list[Action]:
    """Answer the pending request; a new request voids what is left of it, as the subscriber does."""
    actions: list[Action] = []
    for seq in range(start, end):
        actions += stream.replayed(seq, body(seq, process), now_s)
        if RequestReplay in kinds(actions):
            return actions
    return actions + stream.replay_ended(now_s)


def running(batches: int, *, has_replay: bool = True) -> EventStream:
    """A stream that has applied ``batches`` batches of process a and is live."""
    stream = EventStream(has_replay=has_replay)
    stream.connected(0.0)
    if has_replay:
        replay(stream, 0, 0)
    for seq in range(batches):
        assert applied(stream.live(seq, body(seq), 0.0)) == [seq]
    return stream


def test_first_connection_fetches_history_before_live_batches_count() -> None:
    stream = EventStream(has_replay=True)
    assert stream.connected(0.0) == [RequestReplay(0)]
    assert stream.live(3, body(3), 0.0) == []
    assert applied(replay(stream, 0, 4)) == [0, 1, 2, 3]
    assert stream.counters.duplicates == 1
    assert applied(stream.live(4, body(4), 0.0)) == [4]


def test_gap_is_filled_from_replay_before_the_batch_that_showed_it() -> None:
    stream = running(3)
    assert stream.live(5, body(5), 0.0) == [RequestReplay(2)]
    assert applied(replay(stream, 2, 6)) == [3, 4, 5]
    assert stream.counters.gaps == 1
    assert stream.state is StreamState.LIVE


def test_gap_without_replay_marks_the_holder_partial_and_goes_on() -> None:
    stream = running(3, has_replay=False)
    actions = stream.live(5, body(5), 0.0)
    assert kinds(actions) == [MarkPartial, Apply]
    assert stream.counters.gaps == 1
    assert applied(stream.live(6, body(6), 0.0)) == [6]


def test_gap_that_replay_has_already_evicted_marks_partial() -> None:
    stream = running(3)
    stream.live(50, body(50), 0.0)
    actions = replay(stream, 40, 51)
    assert kinds(actions)[0] is MarkPartial
    assert applied(actions) == list(range(40, 51))


def test_history_gone_after_a_reconnect_cannot_prove_the_same_process() -> None:
    stream = running(3)
    stream.disconnected()
    stream.connected(0.0)
    actions = replay(stream, 40, 51)
    assert kinds(actions) == [NewIncarnation, RequestReplay]
    actions = replay(stream, 40, 51)
    assert kinds(actions)[0] is MarkPartial
    assert applied(actions) == list(range(40, 51))


def test_second_gap_during_replay_is_fetched_too() -> None:
    stream = running(3)
    stream.live(5, body(5), 0.0)
    stream.live(8, body(8), 0.0)
    actions = replay(stream, 2, 6)
    assert applied(actions) == [3, 4, 5]
    assert actions[-1] == RequestReplay(5)
    assert applied(replay(stream, 5, 9)) == [6, 7, 8]


def test_replay_overlap_is_never_applied_twice() -> None:
    stream = running(5)
    stream.live(6, body(6), 0.0)
    assert applied(replay(stream, 4, 7)) == [5, 6]
    assert applied(stream.live(7, body(7), 0.0)) == [7]


@pytest.mark.parametrize("has_replay", [True, False])
@pytest.mark.parametrize("first_seen", [0, 2])
def test_sequence_going_backwards_is_a_new_incarnation(has_replay: bool, first_seen: int) -> None:
    stream = running(10, has_replay=has_replay)
    actions = stream.live(first_seen, body(first_seen, "b"), 0.0)
    assert kinds(actions)[0] is NewIncarnation
    if has_replay:
        assert actions[1] == RequestReplay(0)
        assert applied(replay(stream, 0, first_seen + 1, "b")) == list(range(first_seen + 1))
    else:
        assert applied(actions) == [first_seen]
        assert (MarkPartial in kinds(actions)) == (first_seen > 0)


def test_restart_that_overtook_the_old_sequence_is_found_by_comparing_the_replay() -> None:
    stream = running(10)
    stream.disconnected()
    assert stream.connected(0.0) == [RequestReplay(9)]
    stream.live(20, body(20, "b"), 0.0)
    actions = stream.replayed(9, body(9, "b"), 0.0)
    assert kinds(actions) == [NewIncarnation, RequestReplay]
    assert applied(replay(stream, 0, 21, "b")) == list(range(21))


def test_reconnect_to_the_same_process_goes_on_without_loss() -> None:
    stream = running(10)
    stream.disconnected()
    stream.connected(0.0)
    actions = replay(stream, 9, 14)
    assert applied(actions) == [10, 11, 12, 13]
    assert NewIncarnation not in kinds(actions)
    assert stream.counters.incarnations == 0


def test_new_process_with_fewer_batches_than_we_applied_is_a_new_incarnation() -> None:
    stream = running(10)
    stream.disconnected()
    stream.connected(0.0)
    assert kinds(stream.replay_ended(0.0)) == [NewIncarnation, RequestReplay]


def test_reconnect_without_replay_is_suspect_until_the_start_time_proves_otherwise() -> None:
    stream = running(4, has_replay=False)
    stream.process_started(100.0, 0.0)
    stream.disconnected()
    assert kinds(stream.connected(0.0)) == [MarkSuspect]
    assert stream.process_started(100.0, 1.0) == [ClearSuspect()]
    stream.disconnected()
    stream.connected(0.0)
    assert kinds(stream.process_started(200.0, 1.0)) == [NewIncarnation]


def test_changed_start_time_alone_is_a_new_incarnation() -> None:
    stream = running(4)
    stream.process_started(100.0, 0.0)
    assert kinds(stream.process_started(101.0, 1.0)) == [NewIncarnation, RequestReplay]


def test_stalled_replay_is_given_up_and_live_batches_go_on() -> None:
    stream = running(3)
    stream.live(5, body(5), 0.0)
    stream.replayed(2, body(2), 1.0)
    assert stream.tick(5.9) == []
    actions = stream.tick(6.1)
    assert kinds(actions) == [MarkPartial, MarkPartial, Apply]
    assert applied(actions) == [5]


def test_hole_within_a_replay_is_asked_for_again_as_long_as_there_is_progress() -> None:
    stream = EventStream(has_replay=True)
    stream.connected(0.0)
    actions = [a for seq in (0, 1, 4) for a in stream.replayed(seq, body(seq), 0.0)]
    assert applied(actions) == [0, 1]
    assert actions[-1] == RequestReplay(1)
    assert applied(replay(stream, 1, 6)) == [2, 3, 4, 5]
    assert MarkPartial not in kinds(actions)


def test_live_batches_beyond_the_bound_are_dropped_oldest_first_and_fetched_again() -> None:
    stream = EventStream(has_replay=True, max_buffered=3)
    stream.connected(0.0)
    for seq in range(10):
        stream.live(seq, body(seq), 0.0)
    assert stream.counters.overflows == 7
    actions = replay(stream, 0, 5)
    assert actions[-1] == RequestReplay(4)
    assert applied(actions + replay(stream, 4, 10)) == list(range(10))


def test_rank_whose_sibling_found_a_new_process_starts_over() -> None:
    stream = running(10)
    assert stream.sibling_restarted(0.0) == [RequestReplay(0)]
    assert applied(replay(stream, 0, 2, "b")) == [0, 1]
    assert applied(stream.live(2, body(2, "b"), 0.0)) == [2]
