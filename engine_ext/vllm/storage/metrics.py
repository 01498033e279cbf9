# SPDX-License-Identifier: Apache-2.0
"""The storage tier's metrics, as vLLM's stats hooks take them (`vllm/v1/kv_offload/base.py`, `offloading/metrics.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from engine_ext.vllm.storage.counts import Sums
from engine_ext.vllm.storage.health import Degraded
from engine_ext.vllm.storage.store import BlockStore

_PREFIX = "vllm:pointsman_storage_"
BYTES = _PREFIX + "bytes"
CAPACITY = _PREFIX + "capacity_bytes"
FILES = _PREFIX + "files"
DEGRADED = _PREFIX + "degraded"
EVICTIONS = _PREFIX + "evictions"
EVICTED_BYTES = _PREFIX + "evicted_bytes"
READ_BLOCKS = _PREFIX + "read_blocks"
READ_BYTES = _PREFIX + "read_bytes"
READ_SECONDS = _PREFIX + "read_seconds"
WRITTEN_BLOCKS = _PREFIX + "written_blocks"
WRITTEN_BYTES = _PREFIX + "written_bytes"
WRITE_SECONDS = _PREFIX + "write_seconds"
ERRORS = _PREFIX + "errors"
REFUSED = _PREFIX + "refused_blocks"

_COUNTERS = {
    EVICTIONS: "Block files that this worker evicted.",
    EVICTED_BYTES: "Bytes of the block files that this worker evicted.",
    READ_BLOCKS: "Blocks that were read and verified.",
    READ_BYTES: "Bytes of the blocks that were read and verified.",
    READ_SECONDS: "Time of threads spent in successful reads.",
    WRITTEN_BLOCKS: "Blocks that this worker wrote; those that were there already are not counted.",
    WRITTEN_BYTES: "Bytes of the blocks that this worker wrote.",
    WRITE_SECONDS: "Time of threads spent in successful writes, eviction included.",
}
_GAUGES = {
    BYTES: "Bytes of all block files below the root, of all workers, as this worker saw it last.",
    CAPACITY: "Configured capacity of the root.",
    FILES: "Block files below the root that this worker knows of.",
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """As `SecondaryTierManager.build_metric_definitions` returns them."""
    found: dict[str, OffloadingMetricMetadata] = {
        name: OffloadingCounterMetadata(documentation=text) for name, text in _COUNTERS.items()
    }
    found |= {name: OffloadingGaugeMetadata(documentation=text) for name, text in _GAUGES.items()}
    found[DEGRADED] = OffloadingGaugeMetadata(
        documentation="1 while the store is in that state and is left alone.", labelnames=("state",)
    )
    found[ERRORS] = OffloadingCounterMetadata(documentation="What went wrong, by kind.", labelnames=("kind",))
    found[REFUSED] = OffloadingCounterMetadata(
        documentation="Blocks that were neither read nor written, by reason.", labelnames=("reason",)
    )
    return found


@dataclass(slots=True)
class StatsSource:
    """Gauges are sent when they change, counters as they come."""

    _sent: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)

    def take(self, store: BlockStore) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        degraded = store.degraded()
        gauges: dict[tuple[str, tuple[str, ...]], float] = {
            (BYTES, ()): store.room.total_bytes,
            (CAPACITY, ()): store.config.capacity_bytes,
            (FILES, ()): len(store.known),
        }
        gauges |= {(DEGRADED, (state.value,)): float(state in degraded) for state in Degraded}
        for (name, labels), value in gauges.items():
            if self._sent.get((name, labels)) != value:
                self._sent[name, labels] = value
                stats.set_gauge(name, value, labels)
        _add(stats, store.counts.take())
        return None if stats.is_empty() else stats


def _add(stats: OffloadingConnectorStats, sums: Sums) -> None:
    flat = {
        EVICTIONS: sums.evictions,
        EVICTED_BYTES: sums.evicted_bytes,
        READ_BLOCKS: sums.read_blocks,
        READ_BYTES: sums.read_bytes,
        READ_SECONDS: sums.read_seconds,
        WRITTEN_BLOCKS: sums.written_blocks,
        WRITTEN_BYTES: sums.written_bytes,
        WRITE_SECONDS: sums.write_seconds,
    }
    for name, value in flat.items():
        if value:
            stats.increase_counter(name, value)
    for kind, count in sums.errors.items():
        stats.increase_counter(ERRORS, count, (kind,))
    for reason, blocks in sums.refused.items():
        stats.increase_counter(REFUSED, blocks, (reason,))
