# SPDX-License-Identifier: Apache-2.0
"""One thread per router that sends what waits for it. Whatever the router does, nobody else notices."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from random import Random

from engine_ext.vllm.reports.config import REPORTS_PATH, ReportConfig
from engine_ext.vllm.reports.mailing import Answered, Mailing
from engine_ext.vllm.reports.post import Posted, post_json

_log = logging.getLogger(__name__)
_WARN_EVERY_S = 60.0


class RouterSender:
    """Reports to one router, in batches, in the order in which they came."""

    def __init__(self, url: str, config: ReportConfig, engine: str, block_tokens: int) -> None:
        self.url = url
        self._config = config
        self._engine = engine
        self._block_tokens = block_tokens
        self._mailing = Mailing(config.queue, Random(f"{engine} {url}"))
        self._changed = threading.Condition()
        self._ends_s: float | None = None
        self._warned_s = -_WARN_EVERY_S
        self._thread = threading.Thread(target=self._run, name=f"pointsman-reports {url}", daemon=True)
        self._thread.start()

    def add(self, reports: Sequence[bytes]) -> None:
        """Waits for nobody but another `add` or the taking of a batch."""
        with self._changed:
            for one in reports:
                self._mailing.add(one)
            self._changed.notify()

    def counts(self) -> tuple[int, int, int]:
        """Reports that wait, were taken, were lost."""
        with self._changed:
            return len(self._mailing), self._mailing.sent, self._mailing.dropped

    def close(self, ends_s: float) -> None:
        """Sends what waits until `ends_s` of the monotonic clock at most; `join` waits for it."""
        with self._changed:
            self._ends_s = ends_s
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (body := self._next()) is not None:
            posted = post_json(self.url + REPORTS_PATH, body, self._config.token, self._timeout_s())
            with self._changed:
                answered = self._mailing.answered(posted.status)
            if answered is not Answered.TAKEN:
                self._warn(answered, posted)

    def _next(self) -> bytes | None:
        """The next body, once it is time for it; None when this is over."""
        with self._changed:
            self._changed.wait_for(lambda: bool(len(self._mailing)) or self._ends_s is not None)
            pause_s = self._mailing.pause_s()
            self._changed.wait_for(lambda: self._ends_s is not None, pause_s)
            if self._ends_s is not None and (self._mailing.failures or time.monotonic() >= self._ends_s):
                return None  # of a router that was away there is no hope in the time that is left
            return self._mailing.batch(self._engine, self._block_tokens)

    def _timeout_s(self) -> float:
        ends_s = self._ends_s
        if ends_s is None:
            return self._config.timeout_s
        return max(min(self._config.timeout_s, ends_s - time.monotonic()), 0.01)

    def _warn(self, answered: Answered, posted: Posted) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s < _WARN_EVERY_S:
            return
        self._warned_s = now_s
        waiting, _, dropped = self.counts()
        what = "refused reports" if answered is Answered.NEVER else "takes no reports"
        _log.warning(
            "router %s %s (%s %s); %d wait, %d are lost",
            self.url,
            what,
            posted.status or "no answer,",
            posted.detail,
            waiting,
            dropped,
        )
