# SPDX-License-Identifier: Apache-2.0
"""The offloading spec: vLLM's tiering spec with our primary tier on the scheduler's side and our worker on the other.

    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {
      "spec_name": "PointsmanOffloadingSpec", "spec_module_path": "engine_ext.vllm.spec",
      "cpu_bytes_to_use": 68719476736, "blocks_per_chunk": 1,
      "promotion": "gpu_ops",
      "eviction_policy": "PointsmanPolicy", "cache_policy_module_path": "engine_ext.vllm.policy",
      "secondary_tiers": [{"type": "PointsmanTier", "module_path": "engine_ext.vllm.tier"}]
    }

All settings of `TieringOffloadingSpec` keep their meaning. vLLM builds one object in the scheduler's process, of which
it asks `get_manager`, and one in each worker's, of which it asks `get_worker`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from .installed import installed_traits
from .manager import build_manager
from .quarantine import Quarantine
from .worker.choice import Copier, Platform, choose_copier

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingWorker,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

logger = logging.getLogger("vllm.pointsman.spec")


class HostTierTooSmall(ValueError):
    """`cpu_bytes_to_use` does not hold a single chunk."""


class PointsmanOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM has no types here
    """`quarantine` is there before the tiers are built: they read it from the spec that they are given."""

    def __init__(self, config: OffloadingConfig) -> None:
        """Refuses, in both processes, what could only fail later.

        Raises:
            UnsupportedVllm: this vLLM is not in the table of `compat.py`.
            PromotionRefused: no copier of this setting runs on this platform.
        """
        self.traits = installed_traits(config.extra_config)
        self.copier = choose_copier(config.extra_config, _platform())
        self.quarantine = Quarantine()
        super().__init__(config)
        self._manager: TieringOffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        from .quarantined_primary import definitions  # noqa: PLC0415 - workers count nothing

        found: dict[str, OffloadingMetricMetadata] = super().build_metric_definitions(extra_config)
        return found | definitions()

    def get_manager(self) -> OffloadingManager:
        """Scheduler's side: built at the first call.

        Raises:
            HostTierTooSmall: there is no room for a chunk.
            AdapterHookMissing: this vLLM hashes adapters in another way.
        """
        if self._manager is None:
            self._check_room()
            from .adapters.hooks import watch_adapters  # noqa: PLC0415 - workers do not need vLLM's engine core

            if int(self.extra_config.get("store_threshold", 0)) >= 2:
                raise ValueError("store_threshold is not supported with tiers, as in TieringOffloadingSpec")
            self._manager = build_manager(self, self.traits, watch_adapters())
            logger.info(
                "host tier of %d chunks (%s), tiers below it: %s",
                self.num_chunks,
                self.eviction_policy,
                ", ".join(tier.tier_type for tier in self._manager.secondary_tiers) or "none",
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Worker's side: built at the first call; kernels are compiled and the region is pinned when it returns.

        Raises:
            HostTierTooSmall: there is no room for a chunk.
            PromotionRefused: Triton or the CUDA driver is not there.
        """
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.copier is Copier.VLLM:
            return super().create_worker(kv_caches)
        self._check_room()
        from .worker.build import build_worker  # noqa: PLC0415 - the scheduler needs neither torch's CUDA nor gpu_ops

        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        canonical = self.config.canonical_layout
        try:
            if canonical:
                self._validate_canonical_refs(kv_caches)
            worker = build_worker(
                self.copier, kv_caches, region, self.blocks_per_chunk, self.traits, canonical_layout=canonical
            )
        except BaseException:
            region.cleanup()
            raise
        logger.info("promotion and demotion by %s, %d tensors", self.copier.value, len(kv_caches.tensors))
        return worker

    def _check_room(self) -> None:
        if not self.num_chunks:
            raise HostTierTooSmall(
                f"cpu_bytes_to_use is {self.extra_config['cpu_bytes_to_use']}, "
                f"one chunk of {self.blocks_per_chunk} blocks takes {self.kv_bytes_per_chunk}"
            )


def _platform() -> Platform:
    one = current_platform
    return Platform(
        name=str(one.device_name or type(one).__name__),
        is_cuda=one.is_cuda(),
        is_cpu=one.is_cpu(),
        offloads=one.is_cuda_alike() or one.is_xpu(),
    )
