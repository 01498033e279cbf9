# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.parse import parse_object, parse_request
from router.request import RequestKind

_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def parse(document, path="/v1/completions", headers=(), method="POST"):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_request(method, path, list(headers), body, "r1")


@pytest.mark.parametrize(
    ("path", "method", "kind"),
    [
        ("/v1/chat/completions", "POST", RequestKind.CHAT),
        ("/v1/completions", "POST", RequestKind.COMPLETION),
        ("/v1/embeddings", "POST", RequestKind.OTHER),
        ("/v1/responses", "POST", RequestKind.OTHER),
        ("/v1/completions", "GET", RequestKind.OTHER),
    ],
)
def test_the_path_tells_the_kind(path, method, kind):
    assert parse({}, path, method=method).kind is kind


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": []}, 1),
        ({"prompt": [1, "a", []]}, 1),
        ({}, 1),
        ({"prompt": "a", "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 2, "best_of": 4}, 8),
        ({"prompt": "a", "n": "2"}, 2),
        ({"prompt": "a", "n": 2.0}, 2),
        ({"prompt": "a", "n": [2]}, 1),
        ({"prompt": "a", "n": 0}, 1),
        ({"prompt": "a", "n": -5}, 1),
        ({"prompt": "a", "use_beam_search": True}, 2),
        ({"prompt": "a", "use_beam_search": "true", "n": 4}, 4),
        ({"prompt": "a", "prompt_embeds": ["x", "y"]}, 3),
    ],
)
def test_sequences_are_counted_as_the_engine_would_run_them(fields, sequences):
    assert parse(fields).sequences == sequences


def test_chat_counts_one_prompt_whatever_its_messages():
    assert parse({"messages": [{}, {}], "prompt": ["a", "b"], "n": 2}, "/v1/chat/completions").sequences == 2


def test_max_completion_tokens_goes_before_max_tokens_in_chat_only():
    fields = {"max_tokens": 5, "max_completion_tokens": 7}
    assert parse(fields, "/v1/chat/completions").max_tokens == 7
    assert parse(fields).max_tokens == 5


def test_an_empty_salt_is_no_salt():
    assert parse({"cache_salt": ""}).cache_salt is None
    assert parse({"cache_salt": "s1"}).cache_salt == "s1"


@pytest.mark.parametrize(
    ("value", "rank"), [(b"2", 2), (b" 0 ", 0), (b"-1", None), (b"x", None), (b"", None)]
)
def test_the_rank_header_is_read_when_it_is_a_number(value, rank):
    assert parse({}, headers=[(b"x-data-parallel-rank", value)]).dp_rank == rank


@pytest.mark.parametrize(
    ("body", "document"),
    [
        (b'{"a":"\\ud800"}', {"a": "\ud800"}),
        (b'{"a":"\xed\xa0\x80"}', {"a": "\ud800"}),
        (b'\xef\xbb\xbf{"a":1}', {"a": 1}),
        (b'{"a":1,"a":2}', {"a": 2}),
        (b'{"a":123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        (b'{"a":Infinity}', {"a": float("inf")}),
        (b"[1]", None),
        (b"", None),
        (b"{", None),
        (b"null", None),
        ('{"a":1}'.encode("utf-16"), None),
        (b"[" * 200_000, None),
        (b'{"a":' * 200_000, None),
    ],
)
def test_bodies_are_read_if_either_parser_takes_them(body, document):
    assert parse_object(body) == document


def test_wrong_types_count_as_absent():
    request = parse({"model": 7, "stream": {}, "max_tokens": "many", "cache_salt": 3, "prompt": 5})
    assert (request.model, request.stream, request.max_tokens, request.cache_salt) == (
        None,
        False,
        None,
        None,
    )


@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            (
                "model",
                "stream",
                "n",
                "best_of",
                "prompt",
                "use_beam_search",
                "max_tokens",
                "cache_salt",
            ),
            _ANY,
        ),
    )
)
def test_no_document_makes_parsing_fail(document):
    assert parse(document).sequences >= 1


@given(st.binary(max_size=200))
def test_no_bytes_make_parsing_fail_and_the_body_is_kept(body):
    assert parse(body).body == body
