# SPDX-License-Identifier: Apache-2.0
"""The KV bytes per token that the profile says, against what each engine says.

vLLM has no gauge of it. Where an engine offloads, its counters tell: ``vllm:kv_offload_load_bytes`` (bytes that went
from the lower tiers to the GPU, all ranks together) over ``vllm:external_prefix_cache_hits`` (tokens found there).
An engine that repeats its cache over tensor-parallel ranks (MLA, or fewer KV heads than ranks) shows a multiple, and
one with sliding windows loads a little more than its full-attention layers.
"""

from __future__ import annotations

import logging
from typing import Any

_ALLOWED = 0.05

_log = logging.getLogger(__name__)


class KvBytesReport:
    """What engines reported; logs once per worker that differs by more than 5 %."""

    def __init__(self, kv_bytes_per_token: float) -> None:
        self._expected = kv_bytes_per_token
        self._reported: dict[str, float] = {}
        self._warned: set[str] = set()

    def observed(self, worker: str, kv_bytes_per_token: float) -> None:
        """A poll of the worker."""
        self._reported[worker] = kv_bytes_per_token
        if self._differs(kv_bytes_per_token) and worker not in self._warned:
            self._warned.add(worker)
            _log.warning(
                "worker %s loads %.0f bytes of KV per token, the cost profile has %.0f "
                "(costs.model_config or costs.overrides.kv_bytes_per_token sets it)",
                worker,
                kv_bytes_per_token,
                self._expected,
            )

    def forget(self, worker: str) -> None:
        """The worker left the fleet."""
        self._reported.pop(worker, None)
        self._warned.discard(worker)

    def view(self) -> dict[str, Any]:
        """For the admin API."""
        return {
            "profile": self._expected,
            "reported": dict(self._reported),
            "differing": sorted(name for name, size in self._reported.items() if self._differs(size)),
        }

    def _differs(self, kv_bytes_per_token: float) -> bool:
        return abs(kv_bytes_per_token / self._expected - 1) > _ALLOWED
