# SPDX-License-Identifier: Apache-2.0
"""Messages of the handshake, as msgpack maps with a `type` key. Any channel that carries bytes will do.

    reader                                   source
      | -- Hello(boot, fingerprint) -----------> |   compares; a mismatch is answered by Refusal
      | <-- Welcome(offer, fingerprint) -------- |   compares again, checks the metadata
      |            or Refusal(reason) ---------- |

A Hello gives nothing away that could be read from; only a Welcome carries an offer. Each direction of reading has
its own handshake. Sizes are bounded before anything is decoded.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from .errors import HandshakeRefusedError, RefusalReason
from .fingerprint import Fingerprint, ShortText
from .region import Region

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20
BOOT_ID_CHARS = 32

BootId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Backends = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=16)]


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """A reader's first words."""

    version: int
    boot_id: BootId
    backends: Backends
    fingerprint: Fingerprint
    expected_boot_id: BootId | None = None
    """The incarnation whose blocks the reader was promised; another one refuses."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    """A source's consent, with everything that is needed to read its region."""

    version: int
    boot_id: BootId
    answers: BootId
    """The reader's boot id, from its Hello."""
    backends: Backends
    fingerprint: Fingerprint
    agent_name: ShortText
    region: Region
    metadata: bytes
    metadata_digest: bytes
    """SHA-256 of `metadata`: NIXL crashes on metadata that is damaged rather than refusing it."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal", kw_only=True):
    """A source's refusal. Says which, never what the other side's secret is."""

    version: int
    boot_id: BootId
    answers: BootId | None
    reason: RefusalReason
    detail: Annotated[str, msgspec.Meta(max_length=2048)]


class _Version(msgspec.Struct):
    """What every version of every message has."""

    version: int


Message = Hello | Welcome | Refusal

_encoder = msgspec.msgpack.Encoder()
_version_decoder = msgspec.msgpack.Decoder(_Version)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message in `data`.

    Raises:
        HandshakeRefusedError: MALFORMED (too long, not msgpack, not one of the messages) or VERSION, which is
            looked at first: another version's messages need not have our fields.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise HandshakeRefusedError(RefusalReason.MALFORMED, f"{len(data)} bytes, above {MAX_MESSAGE_BYTES}")
    try:
        version = _version_decoder.decode(data).version
        if version != PROTOCOL_VERSION:
            raise HandshakeRefusedError(
                RefusalReason.VERSION, f"version {version}, this side speaks {PROTOCOL_VERSION}"
            )
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandshakeRefusedError(RefusalReason.MALFORMED, str(error)) from error


def digest(metadata: bytes) -> bytes:
    return hashlib.sha256(metadata).digest()
