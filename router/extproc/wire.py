# SPDX-License-Identifier: Apache-2.0
"""From protobuf to the values of ``router.extproc.messages``; ``encode.py`` is the way back.

Messages: ``envoy/service/ext_proc/v3/external_processor.proto``, with the fields as Envoy 1.36 to 1.40 fill them. What
is absent or of an unexpected kind reads as empty; nothing here raises for what a proxy sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.extproc.messages import (
    BodyMode,
    BodySeen,
    HeadersSeen,
    Message,
    Modes,
    Side,
    TrailersSeen,
)
from router.extproc.names import (
    DESTINATION_NAMESPACE,
    SERVED_KEY,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
)
from router.extproc.subset import entries_of
from router.gateway.headers import Headers

_UPSTREAM_ADDRESS = "upstream.address"
"""Attribute of Envoy, to be asked for by ``response_attributes``: stock Envoy does not write the served key."""
_BODY_TAGS = {b"\x22": Side.REQUEST, b"\x2a": Side.RESPONSE}
_BYTES_TAG, _END_FLAG = b"\x0a", b"\x10\x01"
_MODES = {
    1: BodyMode.STREAMED,
    2: BodyMode.BUFFERED,
    3: BodyMode.BUFFERED,  # BUFFERED_PARTIAL: one message too; what is cut off cannot be parsed, so it stays as it is
    4: BodyMode.DUPLEX,
}


def message_of(data: bytes) -> Message | None:
    """The value of an encoded ``ProcessingRequest``; None where it holds nothing.

    Raises:
        google.protobuf.message.DecodeError: it is none.
    """
    body = _body_alone(data)
    if body is not None:
        return body
    request = pb.ProcessingRequest.FromString(data)
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


def _body_alone(data: bytes) -> BodySeen | None:
    """A message that is a body and nothing else, which most are: two lengths and perhaps the end flag around bytes.

    None where it is anything more; reading that is left to the generated classes.
    """
    side = _BODY_TAGS.get(data[:1])
    if side is None:
        return None
    length, at = _length(data, 1)
    if at + length != len(data) or data[at : at + 1] != _BYTES_TAG:
        return None
    length, at = _length(data, at + 1)
    end = at + length
    if end == len(data):
        return BodySeen(side, data[at:end], False)
    return BodySeen(side, data[at:end], True) if data[end:] == _END_FLAG else None


def _length(data: bytes, at: int) -> tuple[int, int]:
    """(a varint of at most four bytes, index behind it); a value that no message has where it is longer."""
    value = 0
    for shift, byte in zip((0, 7, 14, 21), data[at : at + 4], strict=False):
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    return len(data), at


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
