# SPDX-License-Identifier: Apache-2.0
"""Messages of the control channel, as msgpack maps with a `type` key, one per ZMQ message.

    reader (DEALER)                                        source (ROUTER)
      | -- Knock(hello) ------------------------------------> |   once per session; the bytes are messages.py's
      | <------------------------------------ Admit(answer) -- |
      | -- Ask(id, to, tenant, keys, within) ---------------> |   `to`: the boot id that admitted us
      | <----------------------- Answer(id, blocks, lease) -- |   a lease on every block that it names
      | -- Renew(number, to, ids) --------------------------> |
      | <------------------- Renewed(number, ids, lease) ---- |
      | -- Release(id, read) / Bye -------------------------> |
      | <----------------------------- Problem(kind, id) ---- |   instead of an answer; without an id: to all

Every message carries its sender's boot id, so the first word of a restarted peer gives it away. Sizes are bounded
before anything is decoded.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeVar

import msgspec

from engine_ext.transfer.messages import BootId

CONTROL_VERSION = 1
MAX_KEY_BYTES = 64
MAX_KEYS = 16384
MAX_MESSAGE_BYTES = 2 << 20
MAX_IDS = 4096

Id = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Ids = Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_IDS)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Key = Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)]
Keys = Annotated[tuple[Key, ...], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
Blocks = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)], ...], msgspec.Meta(max_length=MAX_KEYS)
]
Tenant = Annotated[str, msgspec.Meta(max_length=256)]


class ProblemKind(Enum):
    """Why a source does not do what it was asked."""

    STALE_BOOT = "stale_boot"
    """The one that was asked is gone; `boot_id` is another incarnation."""
    STRANGER = "stranger"
    """Knock first, or again: idle readers are forgotten."""
    TOO_MANY = "too_many"
    CLOSING = "closing"


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    boot_id: BootId
    """The sender's."""
    version: int = CONTROL_VERSION


class Knock(_Message, frozen=True, kw_only=True, tag="knock"):
    """Opens a session."""

    hello: bytes


class Ask(_Message, frozen=True, kw_only=True, tag="ask"):
    """A lookup, named by the reader."""

    to: BootId
    id: Id
    tenant: Tenant
    keys: Keys
    within_ms: Milliseconds
    """How long the reader waits for the answer."""


class Renew(_Message, frozen=True, kw_only=True, tag="renew"):
    """Of leases, named by their lookups."""

    to: BootId
    number: Id
    ids: Ids


class Release(_Message, frozen=True, kw_only=True, tag="release"):
    """The reader is done with a lookup. No answer."""

    to: BootId
    id: Id
    read: bool


class Bye(_Message, frozen=True, kw_only=True, tag="bye"):
    """The reader is done with the source. No answer."""

    to: BootId


class Admit(_Message, frozen=True, kw_only=True, tag="admit"):
    """The answer to a Knock: a Welcome or a Refusal."""

    answer: bytes


class Answer(_Message, frozen=True, kw_only=True, tag="answer"):
    """The answer to an Ask."""

    id: Id
    blocks: Blocks
    """One for each key: its block in the source's region, or -1."""
    lease_ms: Milliseconds
    """How long the blocks stay, from the moment of this answer."""


class Renewed(_Message, frozen=True, kw_only=True, tag="renewed"):
    """The answer to a Renew. A lease that is not named runs out at its old end, or has done so."""

    number: Id
    ids: Ids
    lease_ms: Milliseconds


class Problem(_Message, frozen=True, kw_only=True, tag="problem"):
    """The answer to a message that cannot be followed, or an announcement (CLOSING)."""

    kind: ProblemKind
    id: Id | None = None


ToSource = Knock | Ask | Renew | Release | Bye
ToReader = Admit | Answer | Renewed | Problem


class MalformedError(ValueError):
    """Not a message that this version understands."""


class _Version(msgspec.Struct):
    version: int


_M = TypeVar("_M", ToSource, ToReader)

_encoder = msgspec.msgpack.Encoder()
_version_decoder = msgspec.msgpack.Decoder(_Version)
_to_source: msgspec.msgpack.Decoder[ToSource] = msgspec.msgpack.Decoder(ToSource)
_to_reader: msgspec.msgpack.Decoder[ToReader] = msgspec.msgpack.Decoder(ToReader)


def encode(message: ToSource | ToReader) -> bytes:
    return _encoder.encode(message)


def read_by_source(data: bytes) -> ToSource:
    """What a reader said.

    Raises:
        MalformedError: too long, not msgpack, another version, or not a message for a source.
    """
    return _decode(_to_source, data)


def read_by_reader(data: bytes) -> ToReader:
    """What a source said. Raises as `read_by_source`."""
    return _decode(_to_reader, data)


def _decode(decoder: msgspec.msgpack.Decoder[_M], data: bytes) -> _M:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedError(f"{len(data)} bytes, above {MAX_MESSAGE_BYTES}")
    try:
        version = _version_decoder.decode(data).version
        if version != CONTROL_VERSION:
            raise MalformedError(f"version {version}, this side speaks {CONTROL_VERSION}")
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(str(error)) from error
