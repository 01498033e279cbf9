# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.gateway.parse import parse_object, parse_request
from router.packed_ids import packed_ids, parsed_ids

SPACE = st.text(alphabet=" \t\n\r", max_size=3)
NUMBER = st.one_of(
    st.integers(0, 2**32 - 1),
    st.integers(0, 200),
    st.sampled_from([0, 9_999_999, 10_000_000, 99_999_999, 2**32 - 1]),
)
ODD = st.sampled_from(
    [
        "-1",
        "-0",
        "00",
        "01",
        "1.0",
        "1e2",
        "4294967296",
        "99999999999999999999999",
        "true",
        "null",
        '"1"',
        "[1]",
        "",
    ]
)
VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["prompt", "a", "\\"]), inner, max_size=3),
    ),
    max_leaves=8,
)
NAME = st.sampled_from(
    ["prompt", "model", "n", "stream", "pro\\u006dpt", "é", '\\"prompt\\":[1', "kv_transfer_params"]
)


@pytest.mark.parametrize("items", [[1, True], [1, 2.5], [1, "2"], [1, None], [-1], [2**32], [2**70], [[1]]])
def test_what_is_not_all_token_ids_is_not_packed(items: list[object]) -> None:
    assert packed_ids(items) is None


def test_token_ids_are_packed_as_they_are() -> None:
    ids = packed_ids([0, 1, 2**32 - 1])
    assert ids is not None
    assert (list(ids), ids.typecode, ids.itemsize) == ([0, 1, 2**32 - 1], "I", 4)


def test_a_prompt_of_mixed_types_stays_as_the_client_wrote_it() -> None:
    request = parse_request("POST", "/v1/completions", (), b'{"prompt": [1, true]}', "id")
    assert request.document == {"prompt": [1, True]}


@st.composite
def lists(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    """A JSON array as text, spaced at random."""
    parts = draw(st.lists(items, max_size=12))
    return (
        draw(SPACE) + "[" + ",".join(draw(SPACE) + part + draw(SPACE) for part in parts) + "]" + draw(SPACE)
    )


@settings(max_examples=400)
@given(lists(NUMBER.map(str)), st.integers(0, 40))
def test_the_text_of_a_list_is_the_numbers_that_it_names(text: str, cut: int) -> None:
    ids = parsed_ids(text.encode())
    assert ids is not None
    assert list(ids) == json.loads(text)
    short = text.rstrip()[: -1 - cut] if cut else text.rstrip()[:-1]
    assert parsed_ids(short.encode()) is None, "a list that does not end"
    assert parsed_ids(text.encode() + b"x") is None


@settings(max_examples=400)
@given(lists(st.one_of(NUMBER.map(str), ODD)))
def test_any_other_text_is_left_to_the_general_parser(text: str) -> None:
    ids = parsed_ids(text.encode())
    try:
        numbers = json.loads(text)
    except ValueError:
        assert ids is None
        return
    if ids is None:
        plain = all(type(one) is int and 0 <= one < 2**32 for one in numbers)
        assert not plain or "-0" in text
    else:
        assert [type(one) for one in numbers] == [int] * len(ids)
        assert list(ids) == numbers


@settings(max_examples=600)
@given(
    st.lists(st.tuples(NAME, st.one_of(lists(NUMBER.map(str)), VALUE.map(json.dumps))), max_size=5),
    SPACE,
    st.data(),
)
@example([("prompt", "[1]"), ("prompt", '"text"')], "", None)
@example([("prompt", "[1]"), ("prompt", "[2, 3]")], " ", None)
@example([("a", '{"prompt": [1]}'), ("prompt", "[7]")], "", None)
def test_a_request_reads_the_same_by_either_way(
    pairs: list[tuple[str, str]], space: str, data: st.DataObject | None
) -> None:
    text = "{" + ",".join(f'{space}"{name}"{space}:{space}{value}' for name, value in pairs) + "}"
    body = text.encode()
    if data is not None and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(body)))
        body = body[:at] + data.draw(st.sampled_from([b"", b"\xff", b"\\", b'"', b","])) + body[at + 1 :]
    expected = parse_object(body)
    found = parse_request("POST", "/v1/completions", (), body, "id").document
    assert plain(found) == plain(expected)
    assert found is None or list(found) == list(expected or {})


def plain(document: Any) -> Any:
    """With a list for an array, and text that tells numbers of different types apart."""
    if document is None:
        return None
    return {
        name: repr(list(value) if isinstance(value, array) else value) for name, value in document.items()
    }


def test_a_large_body_of_ids_is_packed_and_not_cut() -> None:
    ids = [7 * n % 200_001 for n in range(300_000)]
    for text in (json.dumps(ids), json.dumps(ids, separators=(",", ":")), json.dumps(ids, indent=1)):
        request = parse_request("POST", "/v1/completions", (), b'{"n":1,"prompt":%b}' % text.encode(), "id")
        assert request.document is not None
        assert request.document["prompt"] == array("I", ids)
        assert request.sequences == 1
