# SPDX-License-Identifier: Apache-2.0
"""gRPC on a stream: messages however they are cut, one status at the end, one end for each handler."""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass, field

import pytest
from http2_peer import data, frame, frames_of, greeting, headers, message, read_block
from hypothesis import given, settings
from hypothesis import strategies as st

from router.extproc.http2 import frames as f
from router.extproc.http2.connection import Connection
from router.extproc.http2.grpc import Call, Status, open_call
from router.extproc.http2.hpack import Headers, literal

MOST = 1000


@dataclass
class Echo:
    """Answers each message with itself, and the end with the end."""

    call: Call
    got: list[bytes] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)

    def message(self, data: bytes) -> None:
        assert not self.happened
        self.got.append(data)
        self.call.write(data)

    def half_closed(self) -> None:
        self.happened.append("half closed")
        self.call.finish()

    def gone(self) -> None:
        self.happened.append("gone")


class Talk:
    """One connection whose method ``/echo`` echoes."""

    def __init__(self) -> None:
        self.handlers: list[Echo] = []
        self.over: list[Call] = []
        self.output = b""
        self.connection = Connection(self._accept)
        self.say(greeting(window=2**20))

    def _make(self, call: Call) -> Echo:
        self.handlers.append(Echo(call))
        return self.handlers[-1]

    def _accept(self, stream: object, fields: Headers) -> Call:
        methods = {b"/echo": self._make}
        return open_call(self.connection.out, stream, fields, methods, MOST, lambda: None, self.over.append)  # type: ignore[arg-type]

    def say(self, *said: bytes) -> None:
        for one in said:
            self.connection.receive(one)
        self.output += b"".join(self.connection.out.take_output())

    def body(self) -> bytes:
        return b"".join(payload for kind, _, _, payload in frames_of(self.output) if kind == f.DATA)

    def blocks(self) -> list[dict[bytes, bytes]]:
        """Header blocks of the answer."""
        return [
            dict(read_block(payload)) for kind, _, _, payload in frames_of(self.output) if kind == f.HEADERS
        ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=8), st.lists(st.integers(0, 600), max_size=12))
def test_messages_are_whole_however_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(message, messages))
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    talk = Talk()
    talk.say(headers(), *(data(stream[a:b]) for a, b in itertools.pairwise(edges)), data(b"", end=True))
    [one] = talk.handlers
    assert (one.got, one.happened) == (messages, ["half closed"])
    assert talk.body() == stream
    assert talk.blocks()[-1][b"grpc-status"] == b"0"
    assert len(talk.over) == 1


def test_an_answer_without_messages_is_one_block() -> None:
    talk = Talk()
    talk.say(headers(end=True))
    [block] = talk.blocks()
    assert block == {b":status": b"200", b"content-type": b"application/grpc", b"grpc-status": b"0"}


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x01\0\0\0\x01x", Status.UNIMPLEMENTED),  # compressed
        (b"\0\0\0\x03\xe9" + bytes(1001), Status.RESOURCE_EXHAUSTED),
    ],
)
def test_messages_that_are_not_taken_end_the_call(said: bytes, status: Status) -> None:
    talk = Talk()
    talk.say(headers(), data(said), data(message(b"more")))
    [one] = talk.handlers
    assert (one.got, one.happened) == ([], ["gone"])
    assert talk.blocks()[-1][b"grpc-status"] == str(int(status)).encode()


def test_a_stream_that_ends_within_a_message_is_an_error() -> None:
    talk = Talk()
    talk.say(headers(), data(message(b"abc")[:-1], end=True))
    assert talk.handlers[0].happened == ["gone"]
    assert talk.blocks()[-1][b"grpc-status"] == str(int(Status.INTERNAL)).encode()


def test_an_unknown_method_and_what_is_no_grpc_are_answered_at_once() -> None:
    talk = Talk()
    kind = literal(b"content-type", b"application/grpc")
    talk.say(headers(1, block=b"\x83" + literal(b":path", b"/other") + kind))
    talk.say(
        headers(3, block=b"\x83" + literal(b":path", b"/echo") + literal(b"content-type", b"text/plain"))
    )
    talk.say(headers(5, block=b"\x82" + literal(b":path", b"/echo") + kind))
    unknown, text, get = talk.blocks()
    assert unknown[b"grpc-status"] == str(int(Status.UNIMPLEMENTED)).encode()
    assert (text[b":status"], get[b":status"]) == (b"415", b"415")
    assert talk.handlers == []
    assert len(talk.over) == 3


def test_a_call_is_over_once_whatever_ends_it() -> None:
    talk = Talk()
    talk.say(headers(1), headers(3), frame(f.RST_STREAM, 0, 1, bytes(4)))
    talk.handlers[0].call.finish()
    talk.handlers[1].call.cut(Status.UNAVAILABLE, "the end")
    talk.handlers[1].call.write(b"late")
    talk.connection.lost()
    assert [one.happened for one in talk.handlers] == [["gone"], ["gone"]]
    assert len(talk.over) == 2
    talk.say()
    assert talk.body() == b""
    assert talk.blocks()[-1][b"grpc-message"] == b"the end"


def test_a_call_leaves_no_circle_behind() -> None:
    """Circles are left to the collector, whose pauses grew to a tenth of a second with the bodies that they held."""
    talk = Talk()
    gc.collect()
    gc.disable()
    try:
        for number in range(1, 400, 4):
            talk.say(headers(number), data(message(b"x"), number, end=True))
            talk.say(
                headers(number + 2),
                data(message(b"x"), number + 2),
                frame(f.RST_STREAM, 0, number + 2, bytes(4)),
            )
        talk.handlers.clear()
        talk.over.clear()
        left = [one for one in gc.get_objects() if isinstance(one, Call | Echo)]
    finally:
        gc.enable()
    assert left == []
