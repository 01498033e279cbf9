# SPDX-License-Identifier: Apache-2.0
"""Messages of the control channel: bounded, versioned, and never more than an error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.transfer.control.wire import (
    CONTROL_VERSION,
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    Admit,
    Answer,
    Ask,
    Bye,
    Knock,
    MalformedError,
    Problem,
    ProblemKind,
    Release,
    Renew,
    Renewed,
    ToReader,
    ToSource,
    encode,
    read_by_reader,
    read_by_source,
)

A, B = "a" * 32, "b" * 32
TO_SOURCE: list[ToSource] = [
    Knock(boot_id=A, hello=b"hello"),
    Ask(boot_id=A, to=B, id=1, tenant="t", keys=(b"k", b"\x00" * 64), within_ms=100),
    Renew(boot_id=A, to=B, number=3, ids=(1, 2)),
    Release(boot_id=A, to=B, id=1, read=True),
    Bye(boot_id=A, to=B),
]
TO_READER: list[ToReader] = [
    Admit(boot_id=B, answer=b"answer"),
    Answer(boot_id=B, id=1, blocks=(-1, 0, 7), lease_ms=9000),
    Renewed(boot_id=B, number=3, ids=(2,), lease_ms=9000),
    Problem(boot_id=B, kind=ProblemKind.STALE_BOOT, id=4),
    Problem(boot_id=B, kind=ProblemKind.CLOSING),
]


def test_every_message_comes_back_as_it_was_sent() -> None:
    assert [read_by_source(encode(message)) for message in TO_SOURCE] == TO_SOURCE
    assert [read_by_reader(encode(message)) for message in TO_READER] == TO_READER


def test_neither_side_takes_the_other_ones_messages() -> None:
    for message in TO_READER:
        with pytest.raises(MalformedError):
            read_by_source(encode(message))
    for question in TO_SOURCE:
        with pytest.raises(MalformedError):
            read_by_reader(encode(question))


def test_every_message_says_who_sent_it_and_in_which_version() -> None:
    for message in (*TO_SOURCE, *TO_READER):
        fields = msgspec.msgpack.decode(encode(message))
        assert fields["boot_id"] in (A, B)
        assert fields["version"] == CONTROL_VERSION


def test_the_largest_lookup_fits_into_a_message() -> None:
    keys = tuple(number.to_bytes(64) for number in range(MAX_KEYS))
    ask = Ask(boot_id=A, to=B, id=2**62, tenant="t" * 256, keys=keys, within_ms=2**31)
    assert len(encode(ask)) <= MAX_MESSAGE_BYTES
    assert read_by_source(encode(ask)) == ask


@pytest.mark.parametrize(
    "change",
    [
        {"version": CONTROL_VERSION + 1},
        {"version": None},
        {"boot_id": "short"},
        {"boot_id": "A" * 32},
        {"to": 5},
        {"id": 0},
        {"id": -1},
        {"id": 2**63},
        {"tenant": "t" * 257},
        {"keys": []},
        {"keys": [b"k" * 65]},
        {"keys": [b"k"] * (MAX_KEYS + 1)},
        {"keys": "keys"},
        {"within_ms": -1},
        {"within_ms": 1e9},
        {"type": "asks"},
        {"type": 7},
    ],
)
def test_a_message_with_a_field_out_of_bounds_is_malformed(change: dict[str, Any]) -> None:
    fields = msgspec.msgpack.decode(encode(TO_SOURCE[1]))
    assert isinstance(read_by_source(msgspec.msgpack.encode(fields)), Ask)
    with pytest.raises(MalformedError):
        read_by_source(msgspec.msgpack.encode({**fields, **change}))


def test_unknown_fields_are_ignored_so_that_a_later_version_may_say_more() -> None:
    fields = msgspec.msgpack.decode(encode(TO_SOURCE[4]))
    assert read_by_source(msgspec.msgpack.encode({**fields, "more": [1, 2]})) == TO_SOURCE[4]


def test_a_message_that_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(MalformedError, match="above"):
        read_by_source(encode(TO_SOURCE[0]) + bytes(MAX_MESSAGE_BYTES))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_malformed(data: bytes) -> None:
    for read in (read_by_source, read_by_reader):
        with pytest.raises(MalformedError):
            read(data)


@given(st.sampled_from([encode(message) for message in TO_SOURCE]), st.data())
def test_no_damage_raises_anything_but_malformed(message: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(message) - 1))
    damaged = message[:place] + bytes([data.draw(st.integers(0, 255))]) + message[place + 1 :]
    for text in (damaged, message[:place], b"\x91" * 5000 + message):
        try:
            read_by_source(text)
        except MalformedError:
            continue
