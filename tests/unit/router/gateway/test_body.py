# SPDX-License-Identifier: Apache-2.0
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.body import NotAJsonObjectError, insert_keys

_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
_JSON = st.recursive(
    _SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12
)
_OBJECTS = st.dictionaries(st.text(), _JSON)
_SPACE = st.text(" \t\r\n", max_size=4).map(str.encode)


@given(
    document=_OBJECTS,
    keys=_OBJECTS,
    space=st.tuples(_SPACE, _SPACE, _SPACE),
    ascii_only=st.booleans(),
    bom=st.booleans(),
)
def test_inserted_keys_join_the_document_and_every_other_byte_stays(document, keys, space, ascii_only, bom):
    before, inside, after = space
    text = json.dumps(document, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    head = (b"\xef\xbb\xbf" if bom else b"") + before + text[:-1] + inside
    body = head + b"}" + after
    result = insert_keys(body, keys)
    plain = result.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogatepass")
    assert json.loads(plain) == {**document, **keys}
    assert result.startswith(head)
    assert result.endswith(b"}" + after)
    inserted = len(result) - len(body)
    assert result[: len(head)] + result[len(head) + inserted :] == body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", b'{"k":1}'),
        (b" { \n } \r\n", b' { \n "k":1} \r\n'),
        (b'{"a":18446744073709551616123}', b'{"a":18446744073709551616123,"k":1}'),
        (b'{"a":1,"a":2}', b'{"a":1,"a":2,"k":1}'),
        (b'{"a":"\\ud800"}', b'{"a":"\\ud800","k":1}'),
        (b'{"a":"\xed\xa0\x80"}', b'{"a":"\xed\xa0\x80","k":1}'),
        (b'{"a":{}}\n', b'{"a":{},"k":1}\n'),
        (b'{"k":0}', b'{"k":0,"k":1}'),
    ],
)
def test_odd_bodies_keep_their_bytes(body, expected):
    assert insert_keys(body, {"k": 1}) == expected


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"{", b"}", b"[]", b"[{}]", b'"{}"', b"null", b"{} x", b"x {}", '{"a":1}'.encode("utf-16")],
)
def test_bodies_that_are_no_object_are_refused(body):
    with pytest.raises(NotAJsonObjectError):
        insert_keys(body, {"k": 1})


def test_values_without_a_json_form_are_refused():
    with pytest.raises(ValueError, match="JSON compliant"):
        insert_keys(b"{}", {"k": float("inf")})


def test_without_keys_the_body_is_the_same_object_even_if_malformed():
    body = b"not json"
    assert insert_keys(body, {}) is body


def test_large_bodies_and_long_white_space_cost_no_more_than_copies():
    for body in (b'{"a":"' + b"x" * 5_000_000 + b'"}', b"{" + b" " * 5_000_000 + b"}" + b"\n" * 5_000_000):
        started = time.process_time()
        result = insert_keys(body, {"k": 1})
        assert time.process_time() - started < 0.2
        assert len(result) - len(body) in (5, 6)
