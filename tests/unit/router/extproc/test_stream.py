# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from router.errors import NoWorkerAvailable, Overloaded, ShedReason
from router.extproc.messages import (
    BodyAnswer,
    BodyMode,
    BodyPiece,
    HeadersAnswer,
    Immediate,
    Side,
    TrailersAnswer,
)
from router.extproc.stream import Ending
from router.gateway.routing import PrefillLeg
from router.request import Outcome, Usage

from .conftest import GET, LIMIT_BYTES, OK, POST, SSE, Talk, Told, joined, modes

BODY = b'{"model":"m","prompt":"hello"}'
ANSWER = b'{"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":8}}}'
DESTINATION = b"x-gateway-destination-endpoint"


def set_by(answer: HeadersAnswer | BodyAnswer) -> dict[bytes, bytes]:
    return dict(answer.mutation.set_headers)


# Request phase


def test_full_duplex_answers_nothing_before_the_body_is_whole() -> None:
    talk = Talk()
    assert talk.headers() == []
    assert talk.body(BODY[:10]) == []
    first, *rest = talk.body(BODY[10:], end=True)
    assert isinstance(first, HeadersAnswer)
    assert first.side is Side.REQUEST
    assert first.mutation.destination == "10.0.0.1:8000"
    assert set_by(first)[DESTINATION] == b"10.0.0.1:8000"
    assert set_by(first)[b"content-length"] == str(len(BODY)).encode()
    assert first.mutation.remove_headers == (b"x-secret",)
    assert joined(rest) == BODY
    assert rest[-1].end_of_stream
    assert talk.wanted_bodies == [BODY]


def test_parameters_go_into_the_body_and_the_length_follows() -> None:
    talk = Talk(attempt=Told(insert={"kv_transfer_params": {"a": 1}}))
    talk.headers()
    first, *rest = talk.body(BODY, end=True)
    sent = joined(rest)
    assert sent.startswith(BODY[:-1])
    assert json.loads(sent)["kv_transfer_params"] == {"a": 1}
    assert set_by(first)[b"content-length"] == str(len(sent)).encode()


@pytest.mark.parametrize("size", [0, 1, 61_999, 62_000, 62_001, 65_536, 131_073, LIMIT_BYTES])
def test_bodies_of_any_size_come_back_whole_in_small_pieces(size: int) -> None:
    talk = Talk()
    talk.headers()
    body = bytes(i % 251 for i in range(size))
    _, *rest = talk.body(body, end=True)
    assert joined(rest) == body
    assert [one.end_of_stream for one in rest].count(True) == 1
    assert len(rest) == max(-(-size // 62_000), 1)


def test_a_body_above_the_limit_is_answered_413_as_soon_as_that_is_known() -> None:
    talk = Talk()
    talk.headers()
    assert talk.body(b"x" * LIMIT_BYTES) == []
    [answer] = talk.body(b"x")
    assert isinstance(answer, Immediate)
    assert answer.status == 413
    assert dict(answer.headers)[b"x-llm-d-request-dropped-reason"] == b"rejected-too-large"
    assert talk.body(b"x", end=True) == []
    talk = Talk()
    [answer] = talk.headers((*POST, (b"content-length", str(LIMIT_BYTES + 1).encode())))
    assert isinstance(answer, Immediate)
    assert talk.wanted_bodies == []


def test_a_request_without_a_body_is_routed_by_its_headers() -> None:
    talk = Talk()
    [answer] = talk.headers(GET, end=True)
    assert isinstance(answer, HeadersAnswer)
    assert answer.mutation.destination == "10.0.0.1:8000"
    assert b"content-length" not in set_by(answer)


def test_an_empty_last_chunk_after_headers_that_were_the_end_is_answered_once() -> None:
    talk = Talk()
    talk.headers(GET, end=True)
    assert talk.body(b"", end=True) == [BodyPiece(Side.REQUEST, b"", True)]
    assert talk.body(b"", end=True) == []
    assert talk.stream.out_of_order


def test_trailers_end_a_body_that_had_no_end_flag() -> None:
    talk = Talk()
    talk.headers()
    assert talk.body(BODY) == []
    first, *middle, last = talk.trailers()
    assert isinstance(first, HeadersAnswer)
    assert b"content-length" not in set_by(first)
    assert joined(middle) == BODY
    assert not middle[-1].end_of_stream
    assert last == TrailersAnswer(Side.REQUEST)


def test_trailers_without_a_body_are_answered_too() -> None:
    talk = Talk()
    talk.headers()
    first, last = talk.trailers()
    assert isinstance(first, HeadersAnswer)
    assert last == TrailersAnswer(Side.REQUEST)


def test_buffered_headers_go_on_at_once_and_the_body_carries_the_destination() -> None:
    talk = Talk(modes(BodyMode.BUFFERED), Told(insert={"cache_salt": "s"}))
    assert talk.headers() == [HeadersAnswer(Side.REQUEST)]
    [answer] = talk.body(BODY, end=True)
    assert isinstance(answer, BodyAnswer)
    assert answer.data is not None
    assert json.loads(answer.data)["cache_salt"] == "s"
    assert answer.mutation.destination == "10.0.0.1:8000"
    assert set_by(answer)[b"content-length"] == str(len(answer.data)).encode()


def test_a_buffered_body_that_needs_no_change_is_not_sent_back() -> None:
    talk = Talk(modes(BodyMode.BUFFERED))
    talk.headers()
    [answer] = talk.body(BODY, end=True)
    assert isinstance(answer, BodyAnswer)
    assert answer.data is None
    assert b"content-length" not in set_by(answer)


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
def test_where_the_body_is_not_shown_in_time_the_headers_decide(mode: BodyMode) -> None:
    talk = Talk(modes(mode))
    [answer] = talk.headers()
    assert isinstance(answer, HeadersAnswer)
    assert answer.mutation.destination == "10.0.0.1:8000"
    if mode is BodyMode.STREAMED:
        assert talk.body(b"abc") == [BodyAnswer(Side.REQUEST)]
        assert talk.body(b"", end=True) == [BodyAnswer(Side.REQUEST)]


def test_keys_that_a_hidden_body_would_need_are_an_error_not_a_leak() -> None:
    talk = Talk(modes(BodyMode.NONE), Told(insert={"cache_salt": "s"}))
    [answer] = talk.headers()
    assert isinstance(answer, Immediate)
    assert answer.status == 500
    talk.stream.close(Ending.CLOSED, 0.0)
    assert len(talk.attempt.ends) == 1


def test_keys_that_a_body_cannot_take_are_answered_400() -> None:
    talk = Talk(attempt=Told(insert={"cache_salt": "s"}))
    talk.headers()
    [answer] = talk.body(b"no json", end=True)
    assert isinstance(answer, Immediate)
    assert answer.status == 400
    assert talk.attempt.ends == [(Outcome.CLIENT_ERROR, None)]


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (NoWorkerAvailable("no_workers"), 503, b"rejected-no-endpoints"),
        (Overloaded(ShedReason.FULL, 3), 429, b"rejected-saturated"),
        (Overloaded(ShedReason.TIMEOUT, 3), 429, b"rejected-ttl-expired"),
    ],
)
def test_refusals_are_immediate_and_the_last_word(
    error: NoWorkerAvailable | Overloaded, status: int, reason: bytes
) -> None:
    talk = Talk(refuse=error)
    talk.headers((*POST, (b"x-request-id", b"abc")))
    [answer] = talk.body(BODY, end=True)
    assert isinstance(answer, Immediate)
    assert answer.status == status
    sent = dict(answer.headers)
    assert sent[b"x-llm-d-request-dropped-reason"] == reason
    assert sent[b"x-request-id"] == b"abc"
    assert ("retry-after" in {name.decode() for name in sent}) == (status == 429)
    assert talk.response() == []
    talk.stream.close(Ending.CLOSED, 0.0)
    assert talk.watched.last is not None
    assert talk.watched.last.refused_status == status


def test_the_newest_subset_hint_counts() -> None:
    talk = Talk()
    talk.headers(subset=["10.0.0.1:8000"])
    talk.body(BODY, end=True)
    assert talk.subsets == [["10.0.0.1:8000"]]


# Response phase


def routed(attempt: Told | None = None, request_body: bytes = BODY, **more: object) -> Talk:
    talk = Talk(attempt=attempt or Told(), **more)  # type: ignore[arg-type]
    talk.headers()
    talk.body(request_body, end=True)
    return talk


def test_the_answer_passes_unchanged_and_its_usage_is_told() -> None:
    talk = routed()
    [answer] = talk.response()
    assert isinstance(answer, HeadersAnswer)
    assert set_by(answer) == {b"x-pointsman-worker": b"w1"}
    assert joined(talk.response_body(ANSWER[:20])) == ANSWER[:20]
    assert joined(talk.response_body(ANSWER[20:], end=True)) == ANSWER[20:]
    assert talk.attempt.ends == [(Outcome.OK, 200)]
    assert talk.attempt.usages == [Usage(9, 4, 8)]
    assert talk.attempt.first_bytes == 1
    talk.stream.close(Ending.CLOSED, 0.0)
    assert talk.attempt.ends == [(Outcome.OK, 200)]


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.STREAMED])
def test_in_other_modes_each_piece_of_the_answer_is_let_go_on(mode: BodyMode) -> None:
    talk = routed(modes=modes(BodyMode.DUPLEX, mode))
    talk.response()
    assert talk.response_body(ANSWER, end=True) == [BodyAnswer(Side.RESPONSE)]
    assert talk.attempt.usages == [Usage(9, 4, 8)]


def test_an_answer_may_end_by_trailers() -> None:
    talk = routed()
    talk.response()
    talk.response_body(ANSWER)
    assert talk.response_trailers() == [TrailersAnswer(Side.RESPONSE)]
    assert talk.attempt.ends == [(Outcome.OK, 200)]
    assert talk.attempt.usages == [Usage(9, 4, 8)]


def test_an_answer_may_end_with_its_headers() -> None:
    talk = routed()
    talk.response(((b":status", b"503"),), end=True)
    assert talk.attempt.ends == [(Outcome.WORKER_ERROR, 503)]


def test_headers_are_all_there_is_where_bodies_are_not_shown() -> None:
    talk = routed(modes=modes(BodyMode.DUPLEX, BodyMode.NONE))
    talk.response()
    assert talk.attempt.ends == []
    talk.stream.close(Ending.CLOSED, 0.0)
    assert talk.attempt.ends == [(Outcome.OK, 200)]


def test_a_stream_of_events_must_have_its_end_mark() -> None:
    streaming = b'{"model":"m","prompt":"x","stream":true}'
    for last, outcome in ((b"data: [DONE]\n\n", Outcome.OK), (b"", Outcome.WORKER_ERROR)):
        talk = routed(request_body=streaming)
        talk.response(SSE)
        talk.response_body(b'data: {"choices":[{"text":"a"}]}\n\n')
        assert talk.attempt.first_bytes == 1
        talk.response_body(last, end=True)
        assert talk.attempt.ends == [(outcome, 200)]


def test_a_closed_stream_is_the_client_s_doing_and_ours_is_not() -> None:
    for ending, outcome in ((Ending.CLOSED, Outcome.CLIENT_GONE), (Ending.OURS, Outcome.CANCELLED)):
        for progress in range(3):
            talk = routed()
            if progress > 0:
                talk.response()
            if progress > 1:
                talk.response_body(b"{")
            talk.stream.close(ending, 0.0)
            talk.stream.close(Ending.CLOSED, 0.0)
            assert [end[0] for end in talk.attempt.ends] == [outcome]
            assert (talk.watched.routed_count, talk.watched.ended_count) == (1, 1)


def test_an_endpoint_that_served_in_place_of_the_first_takes_over() -> None:
    talk = routed(Told(elsewhere=("w2",)))
    [answer] = talk.response(OK, served="10.0.0.2:8000")
    assert isinstance(answer, HeadersAnswer)
    assert set_by(answer) == {b"x-pointsman-worker": b"w2"}
    talk.response_body(ANSWER, end=True)
    assert talk.attempt.ends == [(Outcome.WORKER_ERROR, None)]
    assert talk.attempt.usages == []
    assert talk.attempt.moved is not None
    assert talk.attempt.moved.ends == [(Outcome.OK, 200)]
    assert talk.attempt.moved.usages == [Usage(9, 4, 8)]


@pytest.mark.parametrize("served", ["10.0.0.3:8000", "192.0.2.1:1", "nonsense"])
def test_an_endpoint_that_nobody_chose_ends_the_attempt_without_blame(served: str) -> None:
    talk = routed(Told(elsewhere=("w2",)))
    [answer] = talk.response(OK, served=served)
    assert isinstance(answer, HeadersAnswer)
    assert set_by(answer) == {b"x-request-id": b"r1"}
    talk.response_body(ANSWER, end=True)
    assert talk.attempt.ends == [(Outcome.CANCELLED, None)]


def test_the_served_endpoint_is_told_where_gateways_are_tested() -> None:
    talk = routed(tells_served=True)
    [answer] = talk.response(OK, served="10.0.0.1:8000")
    assert isinstance(answer, HeadersAnswer)
    assert set_by(answer)[b"x-conformance-test-served-endpoint"] == b"10.0.0.1:8000"
    talk = routed(tells_served=True)
    [answer] = talk.response(OK)
    assert isinstance(answer, HeadersAnswer)
    assert set_by(answer)[b"x-conformance-test-served-endpoint"].startswith(b"fail:")


def test_an_answer_that_has_begun_shows_that_its_prefill_is_done() -> None:
    leg = PrefillLeg("p", "http://p", {}, (), True)
    talk = routed(Told(prefill=leg))
    talk.response()
    talk.response_body(ANSWER, end=True)
    assert talk.attempt.prefills[0] is Outcome.OK


def test_the_proxy_s_own_answer_passes_while_the_body_still_comes_in() -> None:
    talk = Talk()
    talk.headers()
    talk.body(BODY)
    assert talk.response(((b":status", b"408"),)) == [HeadersAnswer(Side.RESPONSE)]
    assert talk.response_body(b"late", end=True) == [BodyPiece(Side.RESPONSE, b"late", True)]
    talk.stream.close(Ending.CLOSED, 0.0)
    assert talk.attempt.ends == []
    assert talk.watched.ended_count == 1


# Disorder


def test_a_body_before_the_headers_is_answered_400_once() -> None:
    talk = Talk()
    [answer] = talk.body(BODY, end=True)
    assert isinstance(answer, Immediate)
    assert answer.status == 400
    assert talk.headers() == []
    assert talk.body(BODY, end=True) == []


def test_headers_without_any_field_are_routed_all_the_same() -> None:
    talk = Talk()
    talk.headers(())
    first, *_ = talk.body(BODY, end=True)
    assert isinstance(first, HeadersAnswer)


def test_disorder_after_the_request_went_on_ends_the_stream_without_a_second_answer() -> None:
    talk = routed()
    assert talk.headers() == []
    assert talk.stream.over
    assert talk.stream.out_of_order
    talk.stream.close(Ending.CLOSED, 0.0)
    assert [end[0] for end in talk.attempt.ends] == [Outcome.CLIENT_GONE]


def test_a_proxy_that_only_observes_is_never_answered() -> None:
    talk = Talk()
    assert talk.headers(observing=True) == []
    assert talk.body(BODY, end=True) == []
    assert talk.response() == []
    talk.stream.close(Ending.CLOSED, 0.0)
    assert (talk.watched.routed_count, talk.watched.ended_count) == (0, 0)


def test_the_tally_has_sizes_and_times() -> None:
    talk = routed()
    talk.response()
    talk.response_body(ANSWER, end=True)
    talk.stream.close(Ending.CLOSED, 999.0)
    tally = talk.watched.last
    assert tally is not None
    assert (tally.request_bytes, tally.response_bytes) == (len(BODY), len(ANSWER))
    times = (tally.started_s, tally.wanted_s, tally.routed_s, tally.first_token_s, tally.ended_s)
    assert times == (100.0, 102.0, 102.0, 104.0, 104.0)
    assert (tally.status, tally.outcome, tally.usage) == (200, Outcome.OK, Usage(9, 4, 8))
