# SPDX-License-Identifier: Apache-2.0
"""vLLM's primary tier, except that it hands out no chunk that a late write may still hit (see `quarantine.py`).

vLLM 0.32 and 0.33 put a freed chunk id on a list (`CPUOffloadingManager._free_chunk`) from which the next store takes
it, and forget all ids at a reset (`reset_cache`). Those are the two places where a held chunk is taken out, and
`_get_num_free_chunks`, which every allocation asks first, is the one where released chunks come back.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

from .quarantine import Quarantine

MALFORMED_HINTS = "vllm:pointsman_malformed_hints"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """What this tier counts beside vLLM's own."""
    text = "Requests whose plan the eviction policy could not read, and took as without hints."
    return {MALFORMED_HINTS: OffloadingCounterMetadata(documentation=text)}


class QuarantinedPrimaryTier(CPUPrimaryTierOffloadingManager):  # type: ignore[misc]  # vLLM has no types here
    """Takes the arguments of `CPUPrimaryTierOffloadingManager`, all by name, and the quarantine."""

    def __init__(self, *, quarantine: Quarantine, **stock: Any) -> None:
        super().__init__(**stock)
        self.quarantine = quarantine
        self._told_malformed = 0

    def _free_chunk(self, chunk: ChunkStatus) -> None:
        self._free_list.extend(self.quarantine.free((chunk.chunk_id,)))

    def _get_num_free_chunks(self) -> int:
        self._free_list.extend(self.quarantine.reclaim())
        return int(super()._get_num_free_chunks())

    def get_stats(self) -> OffloadingConnectorStats:
        stats = super().get_stats()
        # Only our own policy reads hints.
        malformed = getattr(self._policy, "malformed_hints", 0)
        if malformed > self._told_malformed:
            stats.increase_counter(MALFORMED_HINTS, malformed - self._told_malformed)
            self._told_malformed = malformed
        return stats

    def reset_cache(self) -> None:
        super().reset_cache()
        if self.quarantine.held:
            # Stock starts again from chunk 0; held chunks have to be stepped over, so all ids go through the list.
            self._num_allocated_chunks = self._num_chunks
            self._free_list.extend(self.quarantine.all_freed(range(self._num_chunks - 1, -1, -1)))
        else:
            self.quarantine.all_freed(())
