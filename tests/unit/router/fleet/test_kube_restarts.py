# SPDX-License-Identifier: Apache-2.0
"""A restart that Kubernetes tells of, and the event stream that may have seen it already."""

from __future__ import annotations

from indexer.stream import Apply, EventStream, NewIncarnation, RequestReplay


def test_a_restart_told_from_outside_begins_a_new_incarnation_and_fetches_its_history() -> None:
    stream = EventStream(has_replay=True)
    stream.connected(0.0)
    stream.replay_ended(0.0)
    assert stream.live(0, b"old", 1.0) == [Apply(0, b"old")]
    assert stream.restarted("restarted", 2.0) == [NewIncarnation("restarted"), RequestReplay(0)]
    assert stream.replayed(0, b"new", 2.0) == [Apply(0, b"new")]


def test_a_start_time_that_shows_the_same_restart_is_no_further_one() -> None:
    stream = EventStream(has_replay=False)
    stream.connected(0.0)
    assert stream.process_started(1000.0, 0.0) == []
    assert stream.restarted("restarted", 2.0) == [NewIncarnation("restarted")]
    assert stream.process_started(1060.0, 3.0) == []
    assert [type(one) for one in stream.process_started(1120.0, 4.0)] == [NewIncarnation]
