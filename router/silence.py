# SPDX-License-Identifier: Apache-2.0
"""Workers that answer prompts and publish no events: their caches are unknown, and it must show."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

_PROMPTS = 5  # that must have made new blocks, answered without a single event


class BlockMakers:
    """By worker: when its newest answered prompts were sent that must have made new blocks."""

    def __init__(self) -> None:
        self._sent: dict[str, deque[float]] = {}

    def answered(self, worker: str, path_blocks: Mapping[str, int], sent_at_s: float) -> None:
        """A prompt was answered well whose blocks came from there; the last, partial one makes no event."""
        if path_blocks.get("recompute", 0) > 1:
            self.made(worker, sent_at_s)

    def made(self, worker: str, sent_at_s: float) -> None:
        """A prompt sent at that time must have made new blocks there."""
        self._sent.setdefault(worker, deque(maxlen=_PROMPTS)).append(sent_at_s)

    def is_silent(self, worker: str, heard_at_s: float) -> bool:
        """Whether a worker has answered prompts without publishing events since ``heard_at_s``."""
        sent = self._sent.get(worker, ())
        return len(sent) == _PROMPTS and min(sent) > heard_at_s

    def forget(self, worker: str) -> None:
        """The worker left the fleet."""
        self._sent.pop(worker, None)
