# SPDX-License-Identifier: Apache-2.0
import pytest

from router.gateway.answer import Answer, outcome_of_status
from router.gateway.parse import parse_request
from router.request import Outcome, Usage

_SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
_JSON = [(b"content-type", b"application/json")]
_USAGE = b'{"id":"\\ud800","usage":{"prompt_tokens":5,"completion_tokens":1}}'


def answer(headers, *, status=200, path="/v1/completions", body=b'{"stream":true}', max_json_bytes=1000):
    request = parse_request("POST", path, [], body, "r1")
    return Answer(request, status, headers, max_json_bytes)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Outcome.OK),
        (304, Outcome.OK),
        (400, Outcome.CLIENT_ERROR),
        (408, Outcome.BUSY),
        (429, Outcome.BUSY),
        (500, Outcome.WORKER_ERROR),
        (503, Outcome.WORKER_ERROR),
    ],
)
def test_status_tells_whose_fault_it_was(status, outcome):
    assert outcome_of_status(status) is outcome


def test_a_chat_stream_is_complete_only_with_its_end_mark():
    stream = answer(_SSE)
    stream.feed(b"data: {}\n\n")
    stream.end()
    assert not stream.is_complete
    stream = answer(_SSE)
    stream.feed(b"data: [DONE]\n\n")
    assert stream.is_complete


def test_other_streams_are_complete_when_they_end():
    stream = answer(_SSE, path="/v1/responses")
    stream.feed(b"event: response.completed\ndata: {}\n\n")
    assert not stream.is_complete
    stream.end()
    assert stream.is_complete


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(b"400", Outcome.CLIENT_ERROR), (b"500", Outcome.WORKER_ERROR), (b"0", Outcome.WORKER_ERROR)],
)
def test_an_error_event_in_a_whole_stream_decides_its_outcome(code, outcome):
    stream = answer(_SSE)
    stream.feed(b'data: {"error":{"code":' + code + b"}}\n\ndata: [DONE]\n\n")
    stream.end()
    assert stream.outcome is outcome


def test_usage_is_read_from_json_in_pieces_and_with_odd_text():
    whole = answer(_JSON)
    whole.feed(_USAGE[:7])
    whole.feed(_USAGE[7:])
    whole.end()
    assert whole.usage == Usage(5, 1, None)


@pytest.mark.parametrize(
    ("headers", "options"),
    [
        (_JSON, {"max_json_bytes": 10}),
        ([(b"content-type", b"audio/mpeg")], {}),
        ([*_JSON, (b"content-encoding", b"gzip")], {}),
        (_JSON, {"status": 400}),
    ],
)
def test_bodies_that_are_large_or_of_another_type_are_not_looked_into(headers, options):
    body = answer(headers, **options)
    body.feed(_USAGE)
    body.end()
    assert body.usage is None
    assert body.begun
    assert body.is_complete
