# SPDX-License-Identifier: Apache-2.0
"""Reads the body of a worker's answer without trusting its length."""

from __future__ import annotations

import aiohttp


async def read_bounded(answer: aiohttp.ClientResponse, limit_bytes: int, *, cut: bool) -> bytes | None:
    """At most ``limit_bytes`` of a body; a longer one is cut, or None when it must be whole.

    Reading stops at the limit and the connection is closed instead of being drained.
    """
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            answer.close()
            return bytes(body[:limit_bytes]) if cut else None
    return bytes(body)
