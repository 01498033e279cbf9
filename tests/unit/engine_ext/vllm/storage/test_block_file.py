# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_ext.vllm.storage.block_file import HEADER_BYTES, Defect, digest_of, encode_header, find_defect

DIGEST = digest_of(b"fingerprint")
KEY = b"k" * 36


def file_of(payload: bytes, key: bytes = KEY, digest: bytes = DIGEST) -> bytearray:
    return bytearray(encode_header(digest, key, memoryview(payload)) + payload)


def defect_of(content: bytes | bytearray, payload_bytes: int, key: bytes = KEY) -> Defect | None:
    return find_defect(memoryview(content), len(content), DIGEST, key, payload_bytes)


@given(st.binary(min_size=1, max_size=300))
def test_a_whole_file_has_no_defect(payload: bytes) -> None:
    content = file_of(payload)
    assert len(content) == HEADER_BYTES + len(payload)
    assert defect_of(content, len(payload)) is None


@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_changed_bit_is_a_defect(payload: bytes, data: st.DataObject) -> None:
    content = file_of(payload)
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    assert defect_of(content, len(payload)) is not None


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_file_of_another_length_is_a_defect(payload: bytes, data: st.DataObject) -> None:
    content = file_of(payload)
    cut = data.draw(st.integers(0, len(content) - 1))
    assert defect_of(content[:cut], len(payload)) is Defect.LENGTH
    assert defect_of(content + b"x", len(payload)) is Defect.LENGTH


def test_the_file_of_another_key_or_fingerprint_is_foreign() -> None:
    payload = b"p" * 100
    assert defect_of(file_of(payload, key=b"o" * 36), 100) is Defect.FOREIGN
    assert defect_of(file_of(payload, digest=digest_of(b"other")), 100) is Defect.FOREIGN


def test_a_file_that_the_disk_filled_with_zeros_is_a_defect() -> None:
    assert defect_of(bytes(HEADER_BYTES + 100), 100) is Defect.HEADER
    content = file_of(b"p" * 100)
    content[HEADER_BYTES + 50 :] = bytes(50)
    assert defect_of(content, 100) is Defect.CHECKSUM
