# SPDX-License-Identifier: Apache-2.0
"""Header blocks: the examples of RFC 7541, appendix C, and what a broken or hostile peer may send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.extproc.http2.hpack import HeaderDecoder, HpackError, huffman_decoded, literal

GET = ((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com"))
PLAIN = (
    ("828684410f7777772e6578616d706c652e636f6d", GET),
    ("828684be58086e6f2d6361636865", (*GET, (b"cache-control", b"no-cache"))),
    (
        "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
        (
            (b":method", b"GET"),
            (b":scheme", b"https"),
            (b":path", b"/index.html"),
            (b":authority", b"www.example.com"),
            (b"custom-key", b"custom-value"),
        ),
    ),
)
HUFFMAN = (
    "828684418cf1e3c2e5f23a6ba0ab90f4ff",
    "828684be5886a8eb10649cbf",
    "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
)


def test_the_requests_of_the_rfc_are_read_without_and_with_huffman_codes() -> None:
    plain, coded = HeaderDecoder(), HeaderDecoder()
    for (block, headers), other in zip(PLAIN, HUFFMAN, strict=True):
        assert plain.decode(bytes.fromhex(block)) == headers
        assert coded.decode(bytes.fromhex(other)) == headers


def test_entries_leave_a_full_table_oldest_first() -> None:
    """Responses of appendix C.5, whose table holds 256 bytes."""
    decoder = HeaderDecoder(max_table_bytes=256)
    first = decoder.decode(
        bytes.fromhex(
            "4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d546e1768747470"
            "733a2f2f7777772e6578616d706c652e636f6d"
        )
    )
    assert dict(first)[b":status"] == b"302"
    second = decoder.decode(bytes.fromhex("4803333037c1c0bf"))
    assert second == ((b":status", b"307"), *first[1:])
    with pytest.raises(HpackError):
        decoder.decode(b"\xc2")  # the entry that gave way


def test_a_block_that_is_seen_again_means_what_the_table_says_by_then() -> None:
    decoder = HeaderDecoder()
    decoder.decode(b"\x40\x01a\x011")
    assert decoder.decode(b"\xbe") == ((b"a", b"1"),)
    assert decoder.decode(b"\xbe") == ((b"a", b"1"),)
    decoder.decode(b"\x40\x01b\x012")
    assert decoder.decode(b"\xbe") == ((b"b", b"2"),)
    assert decoder.decode(b"\x20") == ()  # the table is emptied
    with pytest.raises(HpackError):
        decoder.decode(b"\xbe")


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # entry 0
        b"\xbe",  # an entry that is not there
        b"\x00\x05ab",  # a name that ends too soon
        b"\x00\x01a",  # no value
        b"\x3f\xff\xff\xff\xff\xff\xff\x01",  # an integer without an end
        b"\x3f\xe2\x1f",  # a table of 4,097 bytes
        b"\x82\x20",  # a change of the table behind a header
        b"\x00\x84\xff\xff\xff\xff\x00",  # the end symbol within a text
        b"\x00\x81\x00\x00",  # padding of zeros
    ],
)
def test_what_is_malformed_is_refused(block: bytes) -> None:
    with pytest.raises(HpackError):
        HeaderDecoder().decode(block)


def test_a_short_block_cannot_stand_for_very_much() -> None:
    decoder = HeaderDecoder(max_list_bytes=10_000)
    decoder.decode(literal(b"a", b"x" * 3000).replace(b"\x00", b"\x40", 1))
    with pytest.raises(HpackError):
        decoder.decode(b"\xbe" * 4)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(block: bytes) -> None:
    decoder = HeaderDecoder()
    for _ in range(2):
        try:
            decoder.decode(block)
        except HpackError:
            return


@given(st.binary(max_size=300), st.binary(max_size=20_000))
def test_what_is_written_is_read_back(name: bytes, value: bytes) -> None:
    assert HeaderDecoder().decode(literal(name, value)) == ((name, value),)


def test_a_huffman_code_needs_its_padding() -> None:
    assert huffman_decoded(bytes.fromhex("f1e3c2e5f23a6ba0ab90f4ff")) == b"www.example.com"
    with pytest.raises(HpackError):
        huffman_decoded(bytes.fromhex("f1e3c2e5f23a6ba0ab90f4ffff"))
