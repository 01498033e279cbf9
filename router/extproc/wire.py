# SPDX-License-Identifier: Apache-2.0
"""Between protobuf and the values of ``router.extproc.messages``. The only file that knows the generated classes.

Messages: ``envoy/service/ext_proc/v3/external_processor.proto``, with the fields as Envoy 1.36 to 1.40 fill them. What
is absent or of an unexpected kind reads as empty; nothing here raises for what a proxy sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.extproc.messages import (
    Answer,
    BodyAnswer,
    BodyMode,
    BodyPiece,
    BodySeen,
    HeadersAnswer,
    HeadersSeen,
    Immediate,
    Message,
    Modes,
    Mutation,
    Side,
    TrailersAnswer,
    TrailersSeen,
)
from router.extproc.names import (
    DESTINATION,
    DESTINATION_NAMESPACE,
    SERVED_KEY,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
)
from router.extproc.subset import entries_of
from router.gateway.headers import Headers

Processing = pb.ProcessingRequest
Processed = pb.ProcessingResponse

_UPSTREAM_ADDRESS = "upstream.address"
"""Attribute of Envoy, to be asked for by ``response_attributes``: stock Envoy does not write the served key."""
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_MODES = {
    1: BodyMode.STREAMED,
    2: BodyMode.BUFFERED,
    3: BodyMode.BUFFERED,  # BUFFERED_PARTIAL: one message too; what is cut off cannot be parsed, so it stays as it is
    4: BodyMode.DUPLEX,
}


def message_of(request: Any) -> Message | None:
    """The value of a ``ProcessingRequest``; None where it holds nothing."""
    kind = request.WhichOneof("request")
    if kind is None:
        return None
    side = Side.REQUEST if kind.startswith("request") else Side.RESPONSE
    part = getattr(request, kind)
    subset = _subset(request) if side is Side.REQUEST else None
    if kind.endswith("_body"):
        return BodySeen(side, part.body, part.end_of_stream, subset)
    if kind.endswith("_trailers"):
        return TrailersSeen(side, subset)
    return HeadersSeen(
        side,
        _headers(part.headers),
        part.end_of_stream,
        subset,
        _served(request) if side is Side.RESPONSE else None,
        _modes(request) if side is Side.REQUEST else None,
        request.observability_mode,
    )


def response_of(answer: Answer) -> Any:
    """The ``ProcessingResponse`` of an answer."""
    response = pb.ProcessingResponse()
    if isinstance(answer, HeadersAnswer):
        part = response.request_headers if answer.side is Side.REQUEST else response.response_headers
        part.SetInParent()
        _change(response, part.response, answer.mutation)
    elif isinstance(answer, BodyPiece):
        part = response.request_body if answer.side is Side.REQUEST else response.response_body
        streamed = part.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = answer.data, answer.end_of_stream
    elif isinstance(answer, BodyAnswer):
        part = response.request_body if answer.side is Side.REQUEST else response.response_body
        part.SetInParent()
        _change(response, part.response, answer.mutation)
        if answer.data is not None:
            part.response.body_mutation.body = answer.data
    elif isinstance(answer, TrailersAnswer):
        part = response.request_trailers if answer.side is Side.REQUEST else response.response_trailers
        part.SetInParent()
    else:
        _answer_at_once(response.immediate_response, answer)
    return response


def _answer_at_once(part: Any, answer: Immediate) -> None:
    part.status.code = answer.status
    _set(part.headers, answer.headers)
    part.body = answer.body
    part.details = answer.detail


def _change(response: Any, common: Any, mutation: Mutation) -> None:
    if mutation.set_headers or mutation.remove_headers:
        _set(common.header_mutation, mutation.set_headers)
        common.header_mutation.remove_headers.extend(
            name.decode("latin-1") for name in mutation.remove_headers
        )
    if mutation.destination is not None:
        common.clear_route_cache = True
        struct = response.dynamic_metadata.get_or_create_struct(DESTINATION_NAMESPACE)
        struct.fields[DESTINATION].string_value = mutation.destination


def _set(header_mutation: Any, headers: Headers) -> None:
    for name, value in headers:
        option = header_mutation.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key = name.decode("latin-1")
        option.header.raw_value = value


def _headers(header_map: Any) -> Headers:
    """Envoy fills ``raw_value``; others may fill ``value``."""
    return [
        (one.key.lower().encode("latin-1", "replace"), one.raw_value or one.value.encode())
        for one in header_map.headers
    ]


def _modes(request: Any) -> Modes | None:
    if not request.HasField("protocol_config"):
        return None
    config = request.protocol_config
    return Modes(
        _MODES.get(config.request_body_mode, BodyMode.NONE),
        _MODES.get(config.response_body_mode, BodyMode.NONE),
    )


def _subset(request: Any) -> Sequence[str] | None:
    """None where the key is not set; an empty list where it is and names nothing."""
    if not request.HasField("metadata_context"):
        return None
    namespaces = request.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in namespaces:
        return None
    fields = namespaces[SUBSET_NAMESPACE].fields
    return entries_of(_plain(fields[SUBSET_KEY])) if SUBSET_KEY in fields else None


def _served(request: Any) -> str | None:
    namespaces = request.metadata_context.filter_metadata
    if DESTINATION_NAMESPACE in namespaces:
        fields = namespaces[DESTINATION_NAMESPACE].fields
        if SERVED_KEY in fields and fields[SERVED_KEY].string_value:
            served: str = fields[SERVED_KEY].string_value
            return served
    for attributes in request.attributes.values():
        if _UPSTREAM_ADDRESS in attributes.fields:
            return attributes.fields[_UPSTREAM_ADDRESS].string_value or None
    return None


def _plain(value: Any) -> object:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [_plain(one) for one in value.list_value.values]
    return value.string_value if kind == "string_value" else None
