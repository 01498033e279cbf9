# SPDX-License-Identifier: Apache-2.0
"""Batches taken many at a time, and frames read one by one: nothing differs from single, whole messages."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import kv_batches as kv
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer import _core
from indexer.errors import ReplayError
from indexer.frames import END_OF_REPLAY, receive_live, receive_replayed
from indexer.hashing import HashKey
from indexer.holders import APPLY_COUNTS
from indexer.index import Backend, IndexLimits, open_index
from indexer.stream import Action, Apply, EventStream

Batches = list[tuple[int, bytes]]

_batches = st.lists(st.tuples(st.integers(0, 12), st.sampled_from([b"a", b"a", b"a", b"b"])), max_size=5)
_runs = st.builds(
    lambda first, count: [(first + i, b"a") for i in range(count)], st.integers(0, 9), st.integers(1, 6)
)
_arrivals = st.one_of(_batches, _runs, _runs)
_happenings = st.lists(
    st.one_of(
        st.tuples(st.just("live"), _arrivals),
        st.tuples(st.just("live"), _arrivals),
        st.tuples(st.just("replayed"), _arrivals),
        st.tuples(st.sampled_from(["replay_ended", "connected", "disconnected"]), st.just([])),
    ),
    max_size=12,
)


def one_by_one(stream: EventStream, what: str, batches: Batches, now_s: float) -> list[Action]:
    actions: list[Action] = []
    for seq, payload in batches:
        actions += (
            stream.live(seq, payload, now_s) if what == "live" else stream.replayed(seq, payload, now_s)
        )
    return actions


def in_runs(stream: EventStream, what: str, batches: Batches, now_s: float) -> list[Action]:
    taken = stream.take(batches, now_s, replayed=what == "replayed")
    actions: list[Action] = [Apply(seq, payload) for seq, payload in batches[:taken]]
    return actions + one_by_one(stream, what, batches[taken:], now_s)


def tell(stream: EventStream, what: str, now_s: float) -> list[Action]:
    if what == "disconnected":
        return stream.disconnected()
    return stream.connected(now_s) if what == "connected" else stream.replay_ended(now_s)


@settings(max_examples=500)
@given(st.booleans(), _happenings)
def test_batches_taken_at_once_do_what_they_do_one_by_one(
    has_replay: bool, happenings: list[tuple[str, Batches]]
) -> None:
    single, many = (EventStream(has_replay=has_replay) for _ in range(2))
    assert single.connected(0.0) == many.connected(0.0)
    for now, (what, batches) in enumerate(happenings):
        if batches:
            assert one_by_one(single, what, batches, now) == in_runs(many, what, batches, now)
        elif what in ("replay_ended", "connected", "disconnected"):
            assert tell(single, what, now) == tell(many, what, now)
        assert {name: getattr(single, name) for name in vars(single)} == {
            name: getattr(many, name) for name in vars(many)
        }


def test_run_is_taken_up_to_the_first_gap_and_no_further() -> None:
    stream = EventStream(has_replay=False)
    stream.connected(0.0)
    assert stream.take([(0, b"a")], 0.0) == 0  # the first batch says where the stream is
    stream.live(0, b"a", 0.0)
    assert stream.take([(1, b"b"), (2, b"c"), (4, b"e"), (5, b"f")], 0.0) == 2
    assert stream.next_seq == 3
    assert stream.take([(2, b"c")], 0.0) == 0


@given(st.binary(max_size=70), st.integers(0, 69), st.integers(1, 255))
def test_digest_changes_with_every_byte_and_length(payload: bytes, at: int, change: int) -> None:
    changed = bytearray(payload)
    if payload:
        changed[at % len(payload)] ^= change
    longer = payload + b"\0"
    found = _core.digests([payload, bytes(changed), longer, payload])
    assert found[0] == found[3] != found[2]
    assert (found[0] != found[1]) == bool(payload)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_many_batches_count_what_each_did(backend: Backend) -> None:
    index = open_index(HashKey(kv.KEY_BYTES), IndexLimits(), backend)
    slot, store = index.open("m", False), index.open("m", False)
    payloads = [
        kv.batch(kv.stored([1, 2, 3]), kv.removed([9])),
        b"rubbish",
        kv.batch(kv.removed([3]), {"type": "Later"}),
        kv.batch(kv.stored([5], parent=4))[:-1],
        kv.batch(kv.stored([5], parent=4), kv.cleared()),
    ]
    counts, malformed = index.apply_many([slot], 0, store, payloads)
    found = {name: getattr(counts, name) for name in APPLY_COUNTS[:-1] if getattr(counts, name)}
    assert found == {
        "stored": 4,
        "removed": 1,
        "clears": 1,
        "detached": 1,
        "unknown_removals": 1,
        "unknown_events": 1,
    }
    assert malformed == 2
    assert index.apply_many([slot], 0, store, [])[1] == 0
    assert index.check() == ""


Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    context = zmq.Context()
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    left.bind("inproc://frames")
    right.connect("inproc://frames")
    yield left, right
    context.destroy(0)


SEQ = struct.pack(">q", 7)


def test_live_message_is_topic_sequence_and_payload(pair: Pair) -> None:
    assert receive_live(pair[1]) is None
    pair[0].send_multipart([b"topic", SEQ, b"payload"])
    assert receive_live(pair[1]) == (7, b"payload")
    assert receive_live(pair[1]) is None


@pytest.mark.parametrize(
    "frames",
    [
        [b"topic"],
        [b"topic", SEQ],
        [b"topic", b"seven", b"payload"],
        [b"topic", SEQ, b"payload", b"", b"more"],
    ],
)
def test_other_live_message_is_refused_and_reading_goes_on(pair: Pair, frames: list[bytes]) -> None:
    pair[0].send_multipart(frames)
    with pytest.raises(ReplayError):
        receive_live(pair[1])
    pair[0].send_multipart([b"topic", SEQ, b"payload"])
    assert receive_live(pair[1]) == (7, b"payload")


def test_short_message_costs_the_one_behind_it_at_most(pair: Pair) -> None:
    for frames in ([b"short"], [b"", SEQ, b"lost"], [b"", SEQ, b"kept"]):
        pair[0].send_multipart(frames)
    with pytest.raises(ReplayError):
        receive_live(pair[1])
    assert receive_live(pair[1]) == (7, b"kept")


def test_replayed_message_has_a_topic_or_not(pair: Pair) -> None:
    assert receive_replayed(pair[1]) is None
    for frames in ([b"", SEQ, b"old"], [b"", b"topic", SEQ, b"new"], [b"", b"", b"\xff" * 8, b""]):
        pair[0].send_multipart(frames)
    assert [receive_replayed(pair[1]) for _ in range(3)] == [(7, b"old"), (7, b"new"), END_OF_REPLAY]
    pair[0].send_multipart([b"x", SEQ, b"old"])
    with pytest.raises(ReplayError):
        receive_replayed(pair[1])
