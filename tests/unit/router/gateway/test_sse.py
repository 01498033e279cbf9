# SPDX-License-Identifier: Apache-2.0
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.sse import EventStream
from router.request import Usage

_USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def event(document):
    return b"data: " + json.dumps(document).encode() + b"\n\n"


RECORDED = (
    b": ping\n\n"
    + event({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None})
    + event({"choices": [{"delta": {"content": 'an "usage" \n\n[DONE] error é'}}]})
    + event({"choices": [], "usage": _USAGE})
    + b"data: [DONE]\n\n"
)


def watch(*pieces):
    stream = EventStream()
    for piece in pieces:
        stream.feed(piece)
    stream.end()
    return stream


def seen(stream):
    return (
        stream.usage,
        stream.done,
        stream.error_seen,
        stream.error_code,
        stream.content_seen,
        stream.at_boundary,
    )


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_a_stream_cut_at_any_byte_tells_the_same(ending):
    recorded = RECORDED.replace(b"\n", ending)
    expected = (Usage(9, 2, 4), True, False, None, True, True)
    for cut in range(len(recorded) + 1):
        assert seen(watch(recorded[:cut], recorded[cut:])) == expected, cut
    assert seen(watch(*(recorded[i : i + 1] for i in range(len(recorded))))) == expected


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_an_event_of_several_lines_is_one_event_wherever_it_is_cut(ending):
    recorded = b'data: {"choices":[],\ndata: "usage":{"prompt_tokens":3}}\n\n'.replace(b"\n", ending)
    for cut in range(len(recorded) + 1):
        assert watch(recorded[:cut], recorded[cut:]).usage == Usage(3, 0, None), cut


@given(
    events=st.lists(
        st.sampled_from(
            [
                b'data: {"choices":[{"text":"a"}]}\n\n',
                b"data:[DONE]\n\n",
                b'data: {"choices":[],"usage":{"prompt_tokens":3}}\r\n\r\n',
                b'event: error\ndata: {"code":500}\n\n',
                b'data: {"error":{"code":404}}\n\n',
                b"data: not json with error\n\n",
                b": comment\n\n",
                b"data: {\ndata: }\n\n",
                b"id: 1\nretry\n\n",
            ]
        ),
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 300), max_size=8),
)
def test_cuts_never_change_what_is_seen(events, cuts):
    recorded = b"".join(events)
    edges = [0, *sorted(min(cut, len(recorded)) for cut in cuts), len(recorded)]
    pieces = [recorded[a:b] for a, b in itertools.pairwise(edges)]
    assert seen(watch(*pieces)) == seen(watch(*(recorded[i : i + 1] for i in range(len(recorded)))))
    assert seen(watch(*pieces)) == seen(watch(recorded))


def test_the_last_usage_that_is_not_null_counts():
    later = {**_USAGE, "completion_tokens": 3}
    stream = watch(
        event({"choices": [{}], "usage": _USAGE}),
        event({"choices": [], "usage": later}),
        event({"usage": None}),
    )
    assert stream.usage == Usage(9, 3, 4)


def test_cached_tokens_are_unknown_where_the_engine_does_not_say():
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": None}
    assert watch(event({"choices": [], "usage": usage})).usage == Usage(1, 1, None)


@pytest.mark.parametrize(
    "usage", [3, [], {}, {"prompt_tokens": "9"}, {"prompt_tokens": True}, {"prompt_tokens": -1}]
)
def test_a_malformed_usage_is_no_usage(usage):
    assert watch(event({"choices": [], "usage": usage})).usage is None


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'data: {"error":{"message":"x","code":500}}\n\n', 500),
        (b'data: {"error":"x"}\n\n', None),
        (b'data: {"object":"error","message":"x","code":400}\n\n', 400),
        (b"event: error\ndata: boom\n\n", None),
    ],
)
def test_error_events_are_seen(data, code):
    stream = watch(data)
    assert (stream.error_seen, stream.error_code, stream.content_seen) == (True, code, False)


def test_a_null_error_is_none():
    assert not watch(event({"choices": [{}], "error": None})).error_seen


def test_content_is_not_seen_in_comments_or_a_lone_usage():
    stream = EventStream()
    stream.feed(b": ping\n\n")
    stream.feed(event({"choices": [], "usage": _USAGE}))
    assert not stream.content_seen
    stream.feed(event({"choices": [{"text": "a"}]}))
    assert stream.content_seen


def test_the_end_mark_counts_without_its_blank_line():
    assert watch(b"data: [DO", b"NE]").done


def test_an_open_event_is_no_boundary():
    stream = EventStream()
    for piece, boundary in ((b"da", False), (b"ta: 1\n", False), (b"\n", True), (b"data: 2\n\n", True)):
        stream.feed(piece)
        assert stream.at_boundary is boundary


def test_an_endless_event_keeps_memory_bounded_and_the_stream_goes_on():
    stream = EventStream(max_event_bytes=1000)
    for _ in range(100):
        stream.feed(b"data: " + b"x" * 900)
        assert sum(map(len, stream._line)) <= 1000
    stream.feed(b"\n")
    for _ in range(100):
        stream.feed(b"data: " + b"x" * 500 + b"\n")
        assert sum(map(len, stream._data)) <= 1000
    stream.feed(b"\n" + RECORDED)
    assert (stream.done, stream.usage) == (True, Usage(9, 2, 4))
