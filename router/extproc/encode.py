# SPDX-License-Identifier: Apache-2.0
"""Answers as bytes of ``envoy.service.ext_proc.v3.ProcessingResponse``, written field by field.

Several are made for each request, and building them of generated classes took half of an answer's time. Field numbers
are those of ``external_processor.proto``, ``base.proto`` and ``struct.proto``; the tests read every answer back with
the generated classes. Only an immediate answer, which is rare and has most fields, is built of those.
"""

from __future__ import annotations

import struct

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.extproc.messages import (
    Answer,
    BodyAnswer,
    BodyPiece,
    HeadersAnswer,
    Immediate,
    Mutation,
    Side,
    TrailersAnswer,
)
from router.extproc.names import DESTINATION, DESTINATION_NAMESPACE, SCORES_KEY
from router.gateway.headers import Headers

_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_SHORT = tuple(bytes((length,)) for length in range(128))

# Tags: field number and wire type 2, a length and so many bytes.
_HEADERS = {Side.REQUEST: b"\x0a", Side.RESPONSE: b"\x12"}
_BODY = {Side.REQUEST: b"\x1a", Side.RESPONSE: b"\x22"}
_TRAILERS = {Side.REQUEST: b"\x2a\x00", Side.RESPONSE: b"\x32\x00"}
_DYNAMIC_METADATA = b"\x42"
_FIRST, _SECOND, _THIRD, _FIFTH = b"\x0a", b"\x12", b"\x1a", b"\x2a"
_CLEAR_ROUTE_CACHE = b"\x28\x01"
_END_OF_STREAM = b"\x10\x01"
_NUMBER, _DOUBLE = b"\x11", struct.Struct("<d")
_APPEND_ACTION = b"\x18" + bytes((_OVERWRITE,))


def answer_bytes(answer: Answer) -> bytes:
    """The encoded ``ProcessingResponse`` of an answer."""
    if isinstance(answer, BodyPiece):
        return _piece(answer)
    if isinstance(answer, HeadersAnswer):
        return _changed(_HEADERS[answer.side], answer.mutation, b"")
    if isinstance(answer, BodyAnswer):
        body = b"" if answer.data is None else _field(_THIRD, _field(_FIRST, answer.data))
        return _changed(_BODY[answer.side], answer.mutation, body)
    if isinstance(answer, TrailersAnswer):
        return _TRAILERS[answer.side]
    return _at_once(answer)


def _piece(answer: BodyPiece) -> bytes:
    """Bytes in a streamed response in a body mutation in a common response: copied once."""
    data, end = answer.data, _END_OF_STREAM if answer.end_of_stream else b""
    first = _begin(_FIRST, len(data)) if data else b""
    length = len(first) + len(data) + len(end)
    for tag in (_THIRD, _THIRD, _FIRST, _BODY[answer.side]):
        begin = _begin(tag, length)
        first = begin + first
        length += len(begin)
    return b"".join((first, data, end))


def _begin(tag: bytes, length: int) -> bytes:
    return tag + (_SHORT[length] if length < 128 else _varint(length))


def _field(tag: bytes, data: bytes) -> bytes:
    length = len(data)
    return b"".join((tag, _SHORT[length] if length < 128 else _varint(length), data))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 128:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _changed(tag: bytes, mutation: Mutation, body_mutation: bytes) -> bytes:
    """A part with its ``CommonResponse``, and the metadata beside it."""
    common = body_mutation
    if mutation.set_headers or mutation.remove_headers:
        removed = b"".join(_field(_SECOND, _utf8(name)) for name in mutation.remove_headers)
        common = _field(_SECOND, _set(mutation.set_headers) + removed) + common
    if mutation.destination is None:
        return _field(tag, _field(_FIRST, common) if common else b"")
    part = _field(tag, _field(_FIRST, common + _CLEAR_ROUTE_CACHE))
    told = _entry(DESTINATION, _field(_THIRD, mutation.destination.encode()))
    if mutation.scores:
        numbers = b"".join(_entry(name, _NUMBER + _DOUBLE.pack(one)) for name, one in mutation.scores.items())
        told += _entry(SCORES_KEY, _field(_FIFTH, numbers))
    return part + _field(_DYNAMIC_METADATA, _entry(DESTINATION_NAMESPACE, _field(_FIFTH, told)))


def _set(headers: Headers) -> bytes:
    return b"".join(
        _field(_FIRST, _field(_FIRST, _field(_FIRST, _utf8(name)) + _field(_THIRD, value)) + _APPEND_ACTION)
        for name, value in headers
    )


def _entry(key: str, value: bytes) -> bytes:
    """A ``Struct`` with one field."""
    return _field(_FIRST, _field(_FIRST, key.encode()) + _field(_SECOND, value))


def _utf8(name: bytes) -> bytes:
    return name if name.isascii() else name.decode("latin-1").encode()


def _at_once(answer: Immediate) -> bytes:
    response = pb.ProcessingResponse()
    part = response.immediate_response
    part.status.code = answer.status
    for name, value in answer.headers:
        option = part.headers.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key = name.decode("latin-1")
        option.header.raw_value = value
    part.body = answer.body
    part.details = answer.detail
    encoded: bytes = response.SerializeToString()
    return encoded
