# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st

from router.extproc.encode import answer_bytes
from router.extproc.messages import (
    BodyAnswer,
    BodyMode,
    BodyPiece,
    BodySeen,
    HeadersAnswer,
    HeadersSeen,
    Immediate,
    Modes,
    Mutation,
    Side,
    TrailersAnswer,
    TrailersSeen,
)
from router.extproc.wire import message_of as decoded


def message_of(message: Any) -> Any:
    return decoded(message.SerializeToString())


def response_of(answer: Any) -> Any:
    return pb.ProcessingResponse.FromString(answer_bytes(answer))


def request(**fields: Any) -> Any:
    return pb.ProcessingRequest(**fields)


def test_headers_are_read_from_either_field_and_in_lower_case() -> None:
    rows = [
        base_pb2.HeaderValue(key=":path", raw_value=b"/v1"),
        base_pb2.HeaderValue(key="X-Odd", value="\u00e9"),
        base_pb2.HeaderValue(key="empty"),
    ]
    part = pb.HttpHeaders(headers=base_pb2.HeaderMap(headers=rows), end_of_stream=True)
    seen = message_of(request(request_headers=part))
    assert isinstance(seen, HeadersSeen)
    assert seen.headers == [(b":path", b"/v1"), (b"x-odd", "\u00e9".encode()), (b"empty", b"")]
    assert (seen.side, seen.end_of_stream, seen.subset, seen.modes) == (Side.REQUEST, True, None, None)


def test_the_modes_of_the_first_message_are_read() -> None:
    one = request(request_headers={})
    one.protocol_config.request_body_mode, one.protocol_config.response_body_mode = 4, 2
    seen = message_of(one)
    assert isinstance(seen, HeadersSeen)
    assert seen.modes == Modes(BodyMode.DUPLEX, BodyMode.BUFFERED)


@pytest.mark.parametrize(
    ("value", "subset"),
    [
        (struct_pb2.Value(string_value="1.1.1.1:1,2.2.2.2:2"), ("1.1.1.1:1", "2.2.2.2:2")),
        (struct_pb2.Value(null_value=struct_pb2.NULL_VALUE), ()),
        (struct_pb2.Value(number_value=5), ()),
        (struct_pb2.Value(), ()),
    ],
)
def test_a_subset_key_that_is_set_is_a_subset_whatever_it_holds(
    value: struct_pb2.Value, subset: tuple[str, ...]
) -> None:
    one = request(request_body=pb.HttpBody(body=b"x"))
    struct = one.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    assert message_of(one).subset is None  # type: ignore[union-attr]
    struct.fields["x-gateway-destination-endpoint-subset"].CopyFrom(value)
    assert message_of(one) == BodySeen(Side.REQUEST, b"x", False, subset)


def test_who_served_is_read_from_the_protocol_s_key_or_from_envoy_s_attribute() -> None:
    one = request(response_headers={})
    one.attributes["envoy.filters.http.ext_proc"].fields["upstream.address"].string_value = "1.1.1.1:1"
    seen = message_of(one)
    assert isinstance(seen, HeadersSeen)
    assert seen.served == "1.1.1.1:1"
    fields = one.metadata_context.filter_metadata["envoy.lb"].fields
    fields["x-gateway-destination-endpoint-served"].string_value = "2.2.2.2:2"
    seen = message_of(one)
    assert isinstance(seen, HeadersSeen)
    assert seen.served == "2.2.2.2:2"


def test_what_holds_nothing_is_nothing() -> None:
    assert message_of(request()) is None
    assert message_of(request(request_trailers={})) == TrailersSeen(Side.REQUEST)


def test_a_destination_is_in_header_and_metadata() -> None:
    mutation = Mutation(((b"x-gateway-destination-endpoint", b"1.1.1.1:1"),), (b"old",), "1.1.1.1:1")
    for answer, field in (
        (HeadersAnswer(Side.REQUEST, mutation), "request_headers"),
        (BodyAnswer(Side.REQUEST, b"new", mutation), "request_body"),
    ):
        response = response_of(answer)
        common = getattr(response, field).response
        assert common.clear_route_cache
        [option] = common.header_mutation.set_headers
        assert (option.header.key, option.header.raw_value) == (
            "x-gateway-destination-endpoint",
            b"1.1.1.1:1",
        )
        assert list(common.header_mutation.remove_headers) == ["old"]
        told = response.dynamic_metadata.fields["envoy.lb"].struct_value
        assert told.fields["x-gateway-destination-endpoint"].string_value == "1.1.1.1:1"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (HeadersAnswer(Side.REQUEST), "request_headers"),
        (HeadersAnswer(Side.RESPONSE), "response_headers"),
        (BodyAnswer(Side.REQUEST), "request_body"),
        (BodyAnswer(Side.RESPONSE), "response_body"),
        (BodyPiece(Side.REQUEST, b"", False), "request_body"),
        (BodyPiece(Side.RESPONSE, b"x", True), "response_body"),
        (TrailersAnswer(Side.REQUEST), "request_trailers"),
        (TrailersAnswer(Side.RESPONSE), "response_trailers"),
        (Immediate(503, ((b"a", b"b"),), b"text", "why"), "immediate_response"),
    ],
)
def test_every_answer_is_a_response_even_if_it_changes_nothing(answer: Any, kind: str) -> None:
    sent = response_of(answer)
    assert sent.WhichOneof("response") == kind
    if isinstance(answer, BodyPiece):
        piece = getattr(sent, kind).response.body_mutation.streamed_response
        assert (piece.body, piece.end_of_stream) == (answer.data, answer.end_of_stream)
    if isinstance(answer, Immediate):
        told = sent.immediate_response
        assert (told.status.code, told.body, told.details) == (503, b"text", "why")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_message_that_can_be_decoded_raises(data: bytes) -> None:
    try:
        pb.ProcessingRequest.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            decoded(data)
    else:
        decoded(data)


BODIES = st.builds(pb.HttpBody, body=st.binary(max_size=300), end_of_stream=st.booleans())


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(["request_body", "response_body"]), BODIES, st.binary(max_size=3), st.integers(0, 2**18)
)
def test_bodies_are_read_as_the_generated_classes_read_them(
    kind: str, body: pb.HttpBody, more: bytes, extra_bytes: int
) -> None:
    body.body += bytes(extra_bytes)
    data = pb.ProcessingRequest(**{kind: body}).SerializeToString() + more
    try:
        one = pb.ProcessingRequest.FromString(data)
    except DecodeError:
        return
    if one.WhichOneof("request") == kind:
        part = getattr(one, kind)
        side = Side(kind.partition("_")[0])
        assert decoded(data) == BodySeen(side, part.body, part.end_of_stream)


NAMES = st.text(st.characters(max_codepoint=255), min_size=1, max_size=200).map(
    lambda text: text.encode("latin-1")
)
HEADERS = st.lists(st.tuples(NAMES, st.binary(max_size=200)), max_size=5)
ENDPOINTS = st.none() | st.text(st.characters(max_codepoint=127), min_size=1, max_size=300)
SCORES = st.none() | st.dictionaries(st.sampled_from(["1.1.1.1:1", "[::1]:2"]), st.floats(allow_nan=False))
MUTATIONS = st.builds(Mutation, HEADERS, st.lists(NAMES, max_size=4), ENDPOINTS, SCORES)
BODY = st.binary(max_size=300).map(lambda data: data * 400)
ANSWERS = (
    st.builds(HeadersAnswer, st.sampled_from(Side), MUTATIONS)
    | st.builds(BodyAnswer, st.sampled_from(Side), st.none() | BODY, MUTATIONS)
    | st.builds(BodyPiece, st.sampled_from(Side), BODY, st.booleans())
    | st.builds(TrailersAnswer, st.sampled_from(Side))
)


@settings(max_examples=500, deadline=None)
@given(ANSWERS)
def test_answers_are_what_the_generated_classes_would_write(answer: Any) -> None:
    """Read back they are equal, and nothing is written that they do not know."""
    assert response_of(answer) == written_by_them(answer)
    assert not UnknownFieldSet(response_of(answer))


def written_by_them(answer: Any) -> Any:
    response = pb.ProcessingResponse()
    side = answer.side.value
    if isinstance(answer, TrailersAnswer):
        getattr(response, f"{side}_trailers").SetInParent()
        return response
    part = getattr(response, f"{side}_headers" if isinstance(answer, HeadersAnswer) else f"{side}_body")
    part.SetInParent()
    if isinstance(answer, BodyPiece):
        piece = part.response.body_mutation.streamed_response
        piece.body, piece.end_of_stream = answer.data, answer.end_of_stream
        piece.SetInParent()
        return response
    mutation = answer.mutation
    for name, value in mutation.set_headers:
        option = part.response.header_mutation.set_headers.add(append_action=2)
        option.header.key, option.header.raw_value = name.decode("latin-1"), value
    part.response.header_mutation.remove_headers.extend(
        name.decode("latin-1") for name in mutation.remove_headers
    )
    if not (mutation.set_headers or mutation.remove_headers):
        part.response.ClearField("header_mutation")
    if mutation.destination is not None:
        part.response.clear_route_cache = True
        struct = response.dynamic_metadata.get_or_create_struct("envoy.lb")
        struct["x-gateway-destination-endpoint"] = mutation.destination
        if mutation.scores:
            struct.get_or_create_struct("x-gateway-destination-endpoint-scores").update(mutation.scores)
    if isinstance(answer, BodyAnswer) and answer.data is not None:
        part.response.body_mutation.body = answer.data
    if not part.response.ByteSize():
        part.ClearField("response")
    return response
