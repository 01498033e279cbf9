# SPDX-License-Identifier: Apache-2.0
"""Trust in a process that serves: kept by the keeper from what all processes observe."""

from __future__ import annotations

from collections.abc import Callable

from router.decisions.trust import Trust
from router.processes.seen import TrustSeen


class FollowedTrust(Trust):
    """Observations go to the keeper; ``set_record`` takes in what it makes of them."""

    def __init__(self, tell: Callable[[TrustSeen], object]) -> None:
        super().__init__()
        self._tell = tell

    def observe(self, worker: str, promised_tokens: int, kept_tokens: int, now_s: float) -> None:
        self._tell(TrustSeen(worker, None, (promised_tokens, kept_tokens), now_s))

    def correct(self, worker: str, before: tuple[int, int], after: tuple[int, int], now_s: float) -> None:
        self._tell(TrustSeen(worker, before, after, now_s))

    def forget(self, worker: str) -> None:
        """The keeper does."""
