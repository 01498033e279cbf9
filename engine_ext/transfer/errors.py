# SPDX-License-Identifier: Apache-2.0
"""Errors of the pull engine.

TransferError
├── TransferConfigError     bad option: names the field, the value and what is accepted
├── HandshakeRefusedError   the two sides must not exchange blocks: a named reason, before any byte moves
├── AgentError              the transfer library refused a step: names the step
│   └── PeerGoneError       ... because the connection to the peer has failed
└── TransferThreadError     the thread that ran the engine has ended
"""

from __future__ import annotations

from enum import Enum


class TransferError(Exception):
    """Base of every error raised by the pull engine."""


class TransferConfigError(TransferError):
    """Bad option."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        super().__init__(f"{field}: {value!r} is not accepted; accepted: {accepted}")


class RefusalReason(Enum):
    """Why a handshake ends without a session. The values are what logs, metrics and the wire carry."""

    MALFORMED = "malformed"
    VERSION = "protocol_version"
    SELF = "self"
    BACKEND = "backend"
    DAMAGED_METADATA = "damaged_metadata"
    STALE_BOOT = "stale_boot"
    MODEL = "model"
    WEIGHTS_REVISION = "weights_revision"
    DTYPE = "dtype"
    BLOCK_LENGTH = "block_length"
    LAYOUT = "layout"
    TP_MAP = "tp_map"
    HASH_SEED = "hash_seed"
    TENANT = "tenant"


class HandshakeRefusedError(TransferError):
    """No session: `reason` names why, `detail` says it in words, without secrets."""

    def __init__(self, reason: RefusalReason, detail: str, *, by_peer: bool = False) -> None:
        self.reason = reason
        self.detail = detail
        self.by_peer = by_peer
        super().__init__(f"{reason.value}: {detail}" + (" (refused by the peer)" if by_peer else ""))


class AgentError(TransferError):
    """The transfer library failed at `step`; nothing of that step is left behind."""

    def __init__(self, step: str, detail: str) -> None:
        self.step = step
        self.detail = detail
        super().__init__(f"{step}: {detail}")


class PeerGoneError(AgentError):
    """The connection to the peer has failed."""


class TransferThreadError(TransferError):
    """The thread that ran the engine has ended; the cause is chained."""
