# SPDX-License-Identifier: Apache-2.0
"""Waiting for a condition: polled until it holds or a generous deadline has passed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE_S = 30.0
_PAUSE_S = 0.01

T = TypeVar("T")


async def eventually(look: Callable[[], Awaitable[T]], what: str, patience_s: float = PATIENCE_S) -> T:
    """The first true value of ``look``.

    Raises:
        AssertionError: there was none in time; names ``what`` and the last value.
    """
    deadline = time.monotonic() + patience_s
    while not (seen := await look()):
        assert time.monotonic() < deadline, f"{what}: still {seen!r} after {patience_s} s"
        await asyncio.sleep(_PAUSE_S)
    return seen


def eventually_now(look: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """The same where there is no event loop."""
    deadline = time.monotonic() + patience_s
    while not (seen := look()):
        assert time.monotonic() < deadline, f"{what}: still {seen!r} after {patience_s} s"
        time.sleep(_PAUSE_S)
    return seen
