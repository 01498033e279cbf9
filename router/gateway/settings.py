# SPDX-License-Identifier: Apache-2.0
"""Limits of the gateway's byte path."""

from __future__ import annotations

import msgspec


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every limit the proxy keeps; the defaults suit vLLM workers."""

    max_body_bytes: int = 64 * 1024 * 1024
    """Largest request body; more is answered 413."""
    connect_timeout_s: float = 5.0
    """Name resolution and TCP connect to a worker."""
    first_byte_timeout_s: float = 600.0
    """From sending the request to the first byte of the answer's body (a non-streamed answer comes whole)."""
    idle_timeout_s: float = 300.0
    """Longest silence between two pieces of an answer."""
    retries: int = 2
    """Further workers tried when one fails before the first byte."""
    keepalive_s: float = 4.0
    """Idle worker connections are dropped after this long, before vLLM's own 5 s keep-alive ends them."""
    max_inspected_bytes: int = 4 * 1024 * 1024
    """Non-streamed JSON answers above this size are not looked into for usage."""
