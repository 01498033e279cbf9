# SPDX-License-Identifier: Apache-2.0
"""`PointsmanStorageTier`: the directory of block files as a secondary tier of vLLM.

    "secondary_tiers": [{"type": "PointsmanStorageTier", "module_path": "engine_ext.vllm.tier",
                         "root_dir": "/mnt/kv", "capacity_bytes": 1099511627776}]

An adapter around `BlockStore`: vLLM's calls in the scheduler's thread, vLLM's types in and out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from engine_ext.vllm.peers.fingerprints import fingerprint_of
from engine_ext.vllm.plan import EvictHints, PlanError, read_plan
from engine_ext.vllm.reports.config import read_report_config
from engine_ext.vllm.reports.shared import open_reports
from engine_ext.vllm.storage.account import Account
from engine_ext.vllm.storage.block_file import HEADER_BYTES, digest_of
from engine_ext.vllm.storage.config import StorageConfig, StorageConfigError, read_config
from engine_ext.vllm.storage.health import Degraded
from engine_ext.vllm.storage.jobs import JobKind
from engine_ext.vllm.storage.lookups import Verdict
from engine_ext.vllm.storage.metrics import StatsSource, definitions
from engine_ext.vllm.storage.region import HostRegion
from engine_ext.vllm.storage.store import BlockStore
from engine_ext.vllm.storage.value import Weight, weights_of

logger = logging.getLogger("vllm.pointsman.storage")

_RESULTS = {Verdict.HIT: LookupResult.HIT, Verdict.MISS: LookupResult.MISS, Verdict.WAIT: LookupResult.RETRY}
_HOUR_S = 3600.0


class PointsmanStorageTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM has no types here
    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **entry: Any,
    ) -> None:
        """
        Raises:
            StorageConfigError: the tier's entry cannot be used, or its root cannot be made.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._config = _checked(read_config(entry), self.block_size_bytes)
        self.locality = Locality(self._config.locality) if self._config.locality else None
        self._says = self._config.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._chunk_tokens = {
            group.group_id: group.tokens_per_block * offloading_spec.blocks_per_chunk
            for group in offloading_spec.config.groups
        }
        self._region = HostRegion(primary_kv_view)
        self._reports = open_reports(
            read_report_config(offloading_spec.extra_config), next(iter(self._chunk_tokens.values()))
        )
        self._account = Account(self._reports)
        self._opened: BlockStore | None = None
        self._shut = False
        self._stats = StatsSource()
        self._hints: dict[str, EvictHints] = {}
        self._was_degraded: frozenset[Degraded] = frozenset()

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        try:
            plan = read_plan(req_context.kv_transfer_params)
        except PlanError:
            plan = None  # whoever carries plans out says so
        if plan is not None:
            self._account.begin(req_context.req_id, plan.plan_id)
            if plan.evict != EvictHints():
                self._hints[req_context.req_id] = plan.evict
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        verdict = self._store.lookup(bytes(key), req_context.req_id)
        self._account.looked_up(req_context.req_id, bytes(key), verdict, time.monotonic())
        return _RESULTS[verdict]

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._hints.pop(req_context.req_id, None)
        self._account.forget(req_context.req_id)
        self._store.forget_request(req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._store.touch([bytes(key) for key in keys])

    # Jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        wanted = self._worth_storing(job_metadata)
        self._store.submit_store(
            job_metadata.job_id,
            [key for key, _, _ in wanted],
            [chunk for _, chunk, _ in wanted],
            [weight for _, _, weight in wanted],
        )

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = [bytes(key) for key in job_metadata.keys]
        chunks = [int(chunk) for chunk in job_metadata.chunk_ids]
        self._account.loading(job_metadata.job_id, job_metadata.req_context.req_id)
        self._store.submit_load(job_metadata.job_id, keys, chunks, Weight(self._config.block_rebuild_s))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for outcome in self._store.collect():
            self._account.ended(outcome)
            good = None
            if outcome.kind is JobKind.LOAD and not outcome.success:
                good = [OffloadKey(key) for key in outcome.good_keys] or None
            results.append(
                JobResult(
                    job_id=outcome.job_id,
                    success=outcome.success,
                    successful_keys=good,
                    transfer_time=outcome.seconds,
                    transfer_bytes=outcome.size_bytes,
                )
            )
        return results

    def has_pending_work(self) -> bool:
        """Also until the store is open and has said what it found, so that an idle engine says it too."""
        return self._opened is None or self._opened.busy

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._store.step_end()
        self._account.step_end(time.monotonic())
        degraded = self._store.degraded()
        if degraded != self._was_degraded:
            names = ", ".join(sorted(state.value for state in degraded)) or "well again"
            logger.warning("the store at %s is %s", self._config.root_dir, names)
            self._was_degraded = degraded
        if not self._says:
            self._store.take_news()

    def drain_jobs(self) -> None:
        """Returns at the last deadline at the latest. A reset follows, so everything is said again."""
        self._store.drain()
        self._store.known.begin_report()

    def shutdown(self) -> None:
        if self._shut:
            return
        self._shut = True
        self._reports.close(1.0)
        if self._opened is not None:
            self._opened.close()
        else:
            self._region.release()

    # What is said

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Stores with `removal_expected`: vLLM then keeps their tokens and parents until our removal, so that its own
        events of a later promotion carry them.
        """
        if not self._says:
            return
        for change in self._store.take_news():
            yield OffloadingEvent(
                keys=[OffloadKey(key) for key in change.keys],
                medium=self.medium,
                removed=change.removed,
                locality=self.locality,
                ownership=self.tier_type,
                removal_expected=not change.removed,
            )

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return definitions()

    def get_stats(self) -> Any:
        return None if self._opened is None else self._stats.take(self._opened)

    # Inside

    @property
    def _store(self) -> BlockStore:
        """Opened at its first use: the root of the block hashes is known only after tiers are built."""
        if self._opened is None:
            fingerprint = fingerprint_of(
                self._offloading_spec.config,
                block_bytes=self.block_size_bytes,
                hash_root=bytes(kv_cache_utils.NONE_HASH),
                platform=current_platform.device_type,
                weights_revision=self._config.weights_revision,
                tenant=self._config.tenant,
            )
            digest = digest_of(msgspec.json.encode(fingerprint, order="deterministic"))
            logger.info("store %s/%s, fingerprint %s", self._config.root_dir, digest.hex(), fingerprint)
            self._opened = BlockStore(self._config, digest, self._region)
        return self._opened

    def _worth_storing(self, job: TransferJob) -> list[tuple[bytes, int, Weight]]:
        """Key, chunk and weight of each, without what the router says nobody will read again."""
        hints = self._hints.get(job.req_context.req_id, EvictHints())
        ends: list[int] = [job.req_context.get_offload_key_position(key) or 0 for key in job.keys]
        tokens: list[int] = [self._chunk_tokens.get(get_offload_group_idx(key), 1) for key in job.keys]
        rebuild_s = self._config.block_rebuild_s
        chunk_tokens = max([1, *tokens])
        if hints.rebuild_s is not None:
            rebuild_s = hints.rebuild_s * chunk_tokens / max([chunk_tokens, *ends])
        weights = weights_of(
            [max(end // size - 1, 0) for end, size in zip(ends, tokens, strict=True)],
            rebuild_s,
            expected_uses=(hints.reuse or 0.0) * self._store.known.half_life_s / _HOUR_S,
            pinned_blocks=hints.pinned_tokens // chunk_tokens,
        )
        private = hints.private_from_token
        return [
            (bytes(key), int(chunk), weight)
            for key, chunk, weight, end in zip(job.keys, job.chunk_ids, weights, ends, strict=True)
            if private is None or end <= private
        ]


def _checked(config: StorageConfig, block_bytes: int) -> StorageConfig:
    if config.capacity_bytes < HEADER_BYTES + block_bytes:
        raise StorageConfigError(
            f"storage tier: capacity_bytes is {config.capacity_bytes}, at least one block of "
            f"{HEADER_BYTES + block_bytes} bytes must fit"
        )
    try:
        Path(config.root_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageConfigError(
            f"storage tier: root_dir {config.root_dir!r} cannot be made: {error}"
        ) from error
    return config
