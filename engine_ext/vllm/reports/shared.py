# SPDX-License-Identifier: Apache-2.0
"""One reporter per process and configuration.

vLLM builds the spec, its tiers and its eviction policy each on its own from their configuration; they all speak of
the same requests, whose reports must be one. So those with equal configuration get the same reporter, and the last
`close` closes it. This is the only state of a module here, because no object of ours sees them all.
"""

from __future__ import annotations

import threading
import uuid

from engine_ext.vllm.reports.config import ReportConfig
from engine_ext.vllm.reports.reporter import Reporter
from engine_ext.vllm.reports.sink import NoReports, ReportSink

_lock = threading.Lock()
_open: dict[tuple[ReportConfig, int], SharedReporter] = {}


class SharedReporter(Reporter):
    """Closed by the last of its users."""

    def __init__(self, config: ReportConfig, engine: str, block_tokens: int) -> None:
        super().__init__(config, engine, block_tokens)
        self.users = 0
        self.key = (config, block_tokens)

    def close(self, timeout_s: float) -> None:
        with _lock:
            self.users -= 1
            last = self.users == 0
            if last:
                del _open[self.key]
        if last:
            super().close(timeout_s)


def open_reports(config: ReportConfig | None, block_tokens: int, engine: str | None = None) -> ReportSink:
    """The sink for this configuration; whoever has got it closes it once. None: nothing is reported.

    `block_tokens`: tokens of one block as calls count them. `engine`: boot id of the process; a new one if None.
    """
    if config is None:
        return NoReports()
    with _lock:
        found = _open.get((config, block_tokens))
        if found is None:
            found = SharedReporter(config, engine or uuid.uuid4().hex, block_tokens)
            _open[found.key] = found
        found.users += 1
    return found
