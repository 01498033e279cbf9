# SPDX-License-Identifier: Apache-2.0
"""The server's side of HTTP/2: flow control both ways, ends of streams, and peers that break the protocol."""

from __future__ import annotations

import itertools
import struct

import pytest
from http2_peer import REQUEST, Talk, data, frame, frames_of, greeting, headers
from hypothesis import given, settings
from hypothesis import strategies as st

from router.extproc.http2 import frames as f
from router.extproc.http2.connection import Connection
from router.extproc.http2.streams import STREAM_WINDOW_BYTES

WORD = struct.Struct(">L")


def test_the_server_says_its_settings_first_and_acknowledges_the_peers() -> None:
    talk = Talk(window=100)
    first, *others = talk.sent
    assert (first[0], first[2]) == (f.SETTINGS, 0)
    assert (f.SETTINGS, f.ACK, 0, b"") in others


def test_headers_data_and_the_end_reach_whoever_serves_the_stream() -> None:
    talk = Talk()
    talk.say(headers(), data(b"abc"), data(b"def", end=True))
    served = talk.served[1]
    assert served.headers[:2] == ((b":method", b"POST"), (b":scheme", b"http"))
    assert (bytes(served.got), served.happened) == (b"abcdef", ["ended"])


CONVERSATION = greeting(window=70_000) + b"".join(
    (
        frame(f.HEADERS, f.PADDED | f.HAS_PRIORITY, 1, b"\x03" + bytes(5) + REQUEST[:7] + bytes(3)),
        frame(f.CONTINUATION, 0, 1, REQUEST[7:9]),
        frame(f.CONTINUATION, f.END_HEADERS, 1, REQUEST[9:]),
        headers(3),
        data(b"x" * 40_000, 3),
        frame(f.DATA, f.PADDED, 1, b"\x02ab\0\0"),
        frame(f.PRIORITY, 0, 3, bytes(5)),
        frame(0xFA, 0, 0, b"unknown"),
        frame(f.PING, 0, 0, b"12345678"),
        data(b"c", 1, end=True),
        frame(f.RST_STREAM, 0, 3, WORD.pack(f.CANCEL)),
    )
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, len(CONVERSATION)), max_size=30))
def test_it_does_not_matter_how_the_network_cuts_what_is_said(cuts: list[int]) -> None:
    talk = Talk.__new__(Talk)
    talk.served, talk.sent = {}, []
    talk.connection = Connection(talk._accept)
    edges = sorted({0, len(CONVERSATION), *cuts})
    for start, end in itertools.pairwise(edges):
        talk.say(CONVERSATION[start:end])
    assert talk.fault() is None
    assert (bytes(talk.served[1].got), talk.served[1].happened) == (b"abc", ["ended"])
    assert (len(talk.served[3].got), talk.served[3].happened) == (40_000, ["gone"])
    assert (f.PING, f.ACK, 0, b"12345678") in talk.sent
    assert set(talk.connection.streams) == {1}


def test_what_does_not_fit_into_the_windows_waits_for_them_in_order() -> None:
    talk = Talk(window=10)
    talk.say(headers())
    stream = talk.served[1].stream
    talk.connection.out.send(stream, (b"0123456", b"789abc"))
    talk.connection.out.send(stream, (b"def",))
    talk.connection.out.end(stream, b"\x88")
    talk.hear()
    assert talk.body() == b"0123456789"
    talk.say(frame(f.WINDOW_UPDATE, 0, 1, WORD.pack(4)))
    assert talk.body() == b"0123456789abcd"
    assert not any(kind == f.HEADERS for kind, *_ in talk.sent)
    news = talk.say(greeting(window=1000)[len(f.PREFACE) :])  # settings move the windows of open streams
    assert talk.body() == b"0123456789abcdef"
    kind, flags, _, _ = next(one for one in news if one[0] == f.HEADERS)
    assert (kind, flags) == (f.HEADERS, f.END_HEADERS | f.END_STREAM)
    assert talk.connection.streams == {}


def test_the_window_of_the_connection_holds_back_every_stream() -> None:
    talk = Talk(window=2**20)
    talk.say(headers(1), headers(3))
    for number in (1, 3):
        talk.connection.out.send(talk.served[number].stream, (b"x" * 60_000,))
    talk.hear()
    assert len(talk.body(1)) + len(talk.body(3)) == f.DEFAULT_WINDOW_BYTES
    talk.say(frame(f.WINDOW_UPDATE, 0, 0, WORD.pack(2**20)))
    assert (len(talk.body(1)), len(talk.body(3))) == (60_000, 60_000)


def test_frames_are_no_larger_than_the_peer_takes() -> None:
    talk = Talk(window=2**20)
    talk.say(headers(), frame(f.WINDOW_UPDATE, 0, 0, WORD.pack(2**20)))
    talk.connection.out.send(talk.served[1].stream, (bytes(100_000),))
    sizes = [len(payload) for kind, _, _, payload in talk.hear() if kind == f.DATA]
    assert sum(sizes) == 100_000
    assert max(sizes) == f.MIN_FRAME_BYTES


def test_nothing_is_sent_while_the_network_is_full() -> None:
    talk = Talk()
    talk.say(headers())
    talk.connection.out.room = False
    talk.connection.out.send(talk.served[1].stream, (b"abc",))
    assert talk.hear() == []
    talk.connection.out.has_room()
    talk.hear()
    assert talk.body() == b"abc"


def test_a_peer_gets_room_again_for_what_was_taken() -> None:
    talk = Talk()
    talk.say(headers())
    sent = 0
    for _ in range(3 * STREAM_WINDOW_BYTES // 2**20):
        talk.say(data(bytes(2**20)))
        sent += 2**20
    assert len(talk.served[1].got) == sent
    given = sum(f.word(payload) for kind, _, to, payload in talk.sent if (kind, to) == (f.WINDOW_UPDATE, 1))
    assert given >= sent - STREAM_WINDOW_BYTES


def test_a_peer_that_takes_no_answers_gets_no_room_for_more() -> None:
    talk = Talk(window=0)
    talk.say(headers())
    talk.connection.out.send(talk.served[1].stream, (bytes(STREAM_WINDOW_BYTES),))
    talk.say(data(bytes(STREAM_WINDOW_BYTES)))
    assert not any((kind, to) == (f.WINDOW_UPDATE, 1) for kind, _, to, _ in talk.sent)
    talk.say(frame(f.WINDOW_UPDATE, 0, 0, WORD.pack(2**30)), frame(f.WINDOW_UPDATE, 0, 1, WORD.pack(2**30)))
    assert any((kind, to) == (f.WINDOW_UPDATE, 1) for kind, _, to, _ in talk.sent)
    assert len(talk.body()) == STREAM_WINDOW_BYTES


def test_a_stream_that_is_answered_before_its_end_is_reset_and_what_still_comes_is_ignored() -> None:
    talk = Talk()
    talk.say(headers())
    talk.connection.out.end(talk.served[1].stream, b"\x88")
    assert talk.hear()[-1] == (f.RST_STREAM, 0, 1, WORD.pack(f.NO_ERROR))
    assert talk.say(data(b"late", end=True), frame(f.RST_STREAM, 0, 1, WORD.pack(0))) == []
    assert talk.served[1].happened == []
    assert not talk.connection.over


def test_every_stream_hears_once_that_the_connection_is_gone() -> None:
    talk = Talk()
    talk.say(headers(1), headers(3), frame(f.RST_STREAM, 0, 1, WORD.pack(f.CANCEL)))
    talk.connection.lost()
    talk.connection.lost()
    assert [talk.served[n].happened for n in (1, 3)] == [["gone"], ["gone"]]


def test_a_drain_tells_the_peer_and_serves_what_is_under_way() -> None:
    talk = Talk()
    talk.say(headers(1))
    talk.connection.refuse_new()
    assert talk.hear() == [(f.GOAWAY, 0, 0, WORD.pack(f.MAX_STREAM_ID) + WORD.pack(f.NO_ERROR))]
    talk.say(data(b"a", 1, end=True), headers(3, end=True))
    assert (talk.served[1].happened, talk.served[3].happened) == (["ended"], ["ended"])


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (headers(2), f.PROTOCOL_ERROR),
        (headers(0), f.PROTOCOL_ERROR),
        (data(b"x", 1), f.PROTOCOL_ERROR),
        (frame(f.DATA, 0, 0, b"x"), f.PROTOCOL_ERROR),
        (headers(1) + headers(1), f.PROTOCOL_ERROR),
        (headers(1, end=True) + data(b"x"), f.STREAM_CLOSED),
        (frame(f.CONTINUATION, 0, 1), f.PROTOCOL_ERROR),
        (frame(f.HEADERS, 0, 1) + data(b"x"), f.PROTOCOL_ERROR),
        (frame(f.HEADERS, 0, 1) + frame(f.CONTINUATION, 0, 3), f.PROTOCOL_ERROR),
        (frame(f.HEADERS, 0, 1) + frame(f.CONTINUATION, 0, 1, bytes(16_384)) * 5, f.ENHANCE_YOUR_CALM),
        (headers(1, block=b"\xbe"), f.COMPRESSION_ERROR),
        (headers(1) + frame(f.DATA, f.PADDED, 1, b"\x05abc"), f.PROTOCOL_ERROR),
        (frame(f.PUSH_PROMISE, 0, 1, bytes(4)), f.PROTOCOL_ERROR),
        (frame(f.PING, 0, 0, b"short"), f.FRAME_SIZE_ERROR),
        (frame(f.SETTINGS, 0, 0, b"short"), f.FRAME_SIZE_ERROR),
        (frame(f.SETTINGS, f.ACK, 0, bytes(6)), f.FRAME_SIZE_ERROR),
        (frame(f.WINDOW_UPDATE, 0, 0, WORD.pack(0)), f.FLOW_CONTROL_ERROR),
        (frame(f.WINDOW_UPDATE, 0, 0, WORD.pack(2**31 - 1)), f.FLOW_CONTROL_ERROR),
        (greeting(window=2**31)[len(f.PREFACE) :], f.FLOW_CONTROL_ERROR),
        (greeting(frame=1)[len(f.PREFACE) :], f.PROTOCOL_ERROR),
        (f.frame_header(16_385, f.DATA, 0, 1), f.FRAME_SIZE_ERROR),
        (frame(f.RST_STREAM, 0, 7, bytes(4)), f.PROTOCOL_ERROR),
        (headers(1) + data(bytes(STREAM_WINDOW_BYTES)) + data(b"x") * 2, None),
        (frame(f.PING, 0, 0, bytes(8)) * 10_001, f.ENHANCE_YOUR_CALM),
        (headers(1) + frame(f.DATA, 0, 1) * 10_001, f.ENHANCE_YOUR_CALM),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_told_why_and_left(said: bytes, code: int | None) -> None:
    talk = Talk()
    talk.say(said)
    assert talk.fault() == code
    if code is not None:
        assert all(one.happened[-1:] == ["gone"] for one in talk.served.values())
        assert talk.say(headers(9)) == []


def test_more_data_than_the_window_allows_is_a_fault() -> None:
    talk = Talk(window=0)
    talk.say(headers())
    talk.connection.out.send(
        talk.served[1].stream, (bytes(STREAM_WINDOW_BYTES),)
    )  # so no room is given again
    talk.say(data(bytes(STREAM_WINDOW_BYTES)), data(b"x"))
    assert talk.fault() == f.FLOW_CONTROL_ERROR


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", f.PREFACE + headers(1)])
def test_what_does_not_begin_as_http_2_is_left(said: bytes) -> None:
    connection = Connection(lambda *_: pytest.fail("a stream"))
    connection.receive(said)
    assert connection.over
    assert frames_of(b"".join(connection.out.take_output()))[-1][0] == f.GOAWAY


FRAMES = st.builds(
    frame,
    st.integers(0, 10),
    st.sampled_from([0, 1, 4, 5, 8, 0x20, 0x2D, 255]),
    st.sampled_from([0, 1, 1, 3, 5, 2]),
    st.one_of(
        st.binary(max_size=30), st.just(REQUEST), st.sampled_from([WORD.pack(n) for n in (0, 1, 2**31 - 1)])
    ),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(FRAMES | st.binary(max_size=20), max_size=25))
def test_whatever_is_said_no_stream_hears_of_two_ends_and_nothing_is_raised(said: list[bytes]) -> None:
    talk = Talk()
    talk.say(*said)
    talk.connection.lost()
    for served in talk.served.values():
        assert served.happened in (["ended"], ["gone"], ["ended", "gone"])
    assert talk.connection.streams == {}
