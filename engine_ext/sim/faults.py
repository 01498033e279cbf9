# SPDX-License-Identifier: Apache-2.0
"""Faults that can be switched on in a running simulated worker (``POST /sim/faults``)."""

from __future__ import annotations

from typing import Literal

import msgspec


class Faults(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is wrong with the worker now. Numbers count down to 0 where they say so."""

    silence: bool = False
    """Events are neither published nor kept for replay, and take no sequence numbers."""
    stall: bool = False
    """Connections are accepted, nothing is answered (also on the peer port); the engine stands still."""
    hang: bool = False
    """The server takes requests and answers what needs no engine; the engine goes on when this ends."""
    error500: bool = False
    """Inference endpoints answer 500."""
    drop_batches: int = 0
    """So many of the next batches take a number but are not published; counts down."""
    lose_replay: bool = False
    """Dropped batches are missing from the replay buffer too."""
    rubbish: int = 0
    """So many malformed messages are published at once; counts down."""
    frozen_metrics: bool = False
    """/metrics goes on answering what it answered last."""
    close_stream_after: int | None = None
    """A stream's connection is closed after so many tokens."""
    close_kind: Literal["eof", "reset"] = "eof"
    error_event: int | None = None
    """A stream carries an error event after so many tokens, then ends as vLLM ends it."""


class FaultOrder(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /sim/faults``: only the keys that are there change."""

    clear: bool = False
    """Everything off before the other keys are read."""
    restart: bool = False
    """Act as a process that was killed and started again at the same addresses."""
    silence: bool | msgspec.UnsetType = msgspec.UNSET
    stall: bool | msgspec.UnsetType = msgspec.UNSET
    hang: bool | msgspec.UnsetType = msgspec.UNSET
    error500: bool | msgspec.UnsetType = msgspec.UNSET
    drop_batches: int | msgspec.UnsetType = msgspec.UNSET
    lose_replay: bool | msgspec.UnsetType = msgspec.UNSET
    rubbish: int | msgspec.UnsetType = msgspec.UNSET
    frozen_metrics: bool | msgspec.UnsetType = msgspec.UNSET
    close_stream_after: int | msgspec.UnsetType | None = msgspec.UNSET
    close_kind: Literal["eof", "reset"] | msgspec.UnsetType = msgspec.UNSET
    error_event: int | msgspec.UnsetType | None = msgspec.UNSET

    def applied_to(self, faults: Faults) -> Faults:
        """The faults after this order."""
        base = Faults() if self.clear else faults
        changes = {
            name: value
            for name in Faults.__struct_fields__
            if (value := getattr(self, name)) is not msgspec.UNSET
        }
        return msgspec.structs.replace(base, **changes)
