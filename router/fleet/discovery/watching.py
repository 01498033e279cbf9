# SPDX-License-Identifier: Apache-2.0
"""The wire format of lists and watches of the Kubernetes API, decoded. Pure.

A list is an object with ``items`` and, in ``metadata``, the ``resourceVersion`` to watch from and a ``continue`` token
when there is more. A watch is a stream of lines ``{"type": ..., "object": ...}``; of a BOOKMARK only the version
counts, an ERROR holds a Status (https://kubernetes.io/docs/reference/using-api/api-concepts/).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

_log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 * 2**20
"""An object is at most 1.5 MiB in etcd; this only stops what is no watch at all."""
GONE = 410

T = TypeVar("T")


class What(enum.Enum):
    """Kinds of watch events."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


@dataclass(frozen=True, slots=True)
class Event(Generic[T]):
    """One event; ``one`` is None for a bookmark, and for an object that is not what was expected."""

    what: What
    version: str
    one: T | None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list."""

    items: list[T]
    version: str
    more: str
    """Token for the next page; empty at the end."""
    malformed: int


class ApiError(Exception):
    """The API server refused; ``status`` is the HTTP status, or that of a Status object."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(f"{status}: {message[:200]}")


class _ListMeta(Struct, rename="camel"):
    resource_version: str = ""
    more: str = msgspec.field(name="continue", default="")


class _List(Struct):
    metadata: _ListMeta
    items: list[Raw] | None = None


class _Line(Struct):
    type: str
    object: Raw


class _Versioned(Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)


class _Status(Struct):
    code: int = 0
    message: str = ""


class Wire(Generic[T]):
    """Decodes objects of one type. An object that does not fit is left out and logged, never the whole list."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self._object = msgspec.json.Decoder(kind)
        self._list = msgspec.json.Decoder(_List)
        self._line = msgspec.json.Decoder(_Line)
        self._versioned = msgspec.json.Decoder(_Versioned)

    def page(self, body: bytes) -> Page[T]:
        """One page of a list.

        Raises:
            ApiError: it is no list.
        """
        try:
            found = self._list.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(0, f"no list: {error}") from error
        objects = [self._decode(item) for item in found.items or ()]
        items = [one for one in objects if one is not None]
        return Page(items, found.metadata.resource_version, found.metadata.more, len(objects) - len(items))

    def event(self, line: bytes) -> Event[T]:
        """One line of a watch.

        Raises:
            ApiError: an ERROR event (410: the version is too old), or a line that is none.
        """
        try:
            found = self._line.decode(line)
            if found.type == "ERROR":
                status = msgspec.json.decode(found.object, type=_Status)
                raise ApiError(status.code, status.message)
            what = What(found.type)
            version = self._versioned.decode(found.object).metadata.resource_version
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise ApiError(0, f"no watch event: {error}") from error
        return Event(what, version, None if what is What.BOOKMARK else self._decode(found.object))

    def _decode(self, raw: Raw) -> T | None:
        try:
            return self._object.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("a %s that cannot be read: %s", self._kind.__name__, error)
            return None


class Lines:
    """Cuts a byte stream into lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Whole lines, without their ends; empty ones are skipped.

        Raises:
            ApiError: a line without an end in sight.
        """
        self._rest += chunk
        if b"\n" in chunk:
            *whole, rest = self._rest.split(b"\n")
            self._rest = bytearray(rest)
            for line in whole:
                if line.strip():
                    yield bytes(line)
        if len(self._rest) > MAX_LINE_BYTES:
            raise ApiError(0, f"a line of more than {MAX_LINE_BYTES} bytes")
