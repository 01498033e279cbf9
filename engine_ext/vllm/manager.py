# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiering manager with our primary tier: the same parts as `TieringOffloadingSpec.get_manager` puts together."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from .checked_manager import CheckedManager
from .compat import Traits
from .forgetting_primary import ForgettingPrimaryTier
from .reporting_primary import ReportingPrimaryTier
from .reports.config import read_report_config
from .reports.shared import open_reports
from .visits import HostVisits

if TYPE_CHECKING:
    from .adapters.revisions import AdapterRevisions
    from .spec import PointsmanOffloadingSpec


def build_manager(
    spec: PointsmanOffloadingSpec, traits: Traits, adapters: AdapterRevisions
) -> CheckedManager:
    """The manager, its tiers built in the order of the configuration.

    If one of them cannot be built, those before it are shut down, and the region goes, before the error leaves.
    """
    with contextlib.ExitStack() as undo:
        region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=None,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        undo.callback(region.cleanup)
        primary = _primary_tier(
            spec,
            quarantine=spec.quarantine,
            adapters=adapters,
            num_chunks=spec.num_chunks,
            cache_policy=spec.eviction_policy,
            cache_policy_module_path=spec.cache_policy_module_path,
            enable_events=spec.kv_events_config.enable_kv_cache_events,
            mmap_region=region,
            **_info(spec, traits),
        )
        undo.callback(primary.shutdown)
        tiers = []
        for entry in spec.secondary_tier_configs:
            tier = SecondaryTierFactory.create_secondary_tier(entry, primary.get_kv_memoryview(), spec)
            undo.callback(tier.shutdown)
            tiers.append(tier)
        manager = CheckedManager(
            adapters=adapters, primary_tier=primary, secondary_tiers=tiers, **_polling(spec, traits)
        )
        undo.pop_all()
    return manager


def _primary_tier(spec: PointsmanOffloadingSpec, **arguments: Any) -> ForgettingPrimaryTier:
    """The one that reports costs a little per lookup, so it is there only where somebody listens."""
    config = read_report_config(spec.extra_config)
    if config is None:
        return ForgettingPrimaryTier(**arguments)
    reports = open_reports(config, spec.tokens_per_block[0] * spec.blocks_per_chunk)
    # The peer tier ends a report when its last pull is over, which may be later than the request.
    ends = all(entry.get("type") != "PointsmanTier" for entry in spec.secondary_tier_configs)
    visits = HostVisits(reports, spec.kv_bytes_per_chunk, ends_reports=ends)
    try:
        return ReportingPrimaryTier(visits=visits, **arguments)
    except BaseException:
        visits.close()
        raise


def _info(spec: PointsmanOffloadingSpec, traits: Traits) -> dict[str, Any]:
    return {"info": spec.cpu_info} if traits.config_info else {}


def _polling(spec: PointsmanOffloadingSpec, traits: Traits) -> dict[str, Any]:
    return {"tier_poll_interval_s": spec.tier_poll_interval_s} if traits.manager_has_lock else {}
