# SPDX-License-Identifier: Apache-2.0
"""`PointsmanTier`: the secondary tier that carries out plans inside vLLM.

    "secondary_tiers": [{"type": "PointsmanTier", "module_path": "engine_ext.vllm.tier",
                         "control": {"bind_host": "10.0.0.7", "port": 5720}}]

An adapter: what vLLM calls in the scheduler's thread goes to `reader.py` and `source.py`, which never wait.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    ParentManager,
    SecondaryTierManager,
    TransferJob,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from engine_ext.transfer.config import TransferConfig
from engine_ext.transfer.control.config import ControlConfig
from engine_ext.transfer.control.link import open_link
from engine_ext.transfer.region import HostRegion
from engine_ext.vllm.plan import PlanError, read_plan
from engine_ext.vllm.quarantine import Quarantine
from engine_ext.vllm.reports.config import read_report_config
from engine_ext.vllm.reports.shared import open_reports

from .account import Account
from .exchange import Exchange
from .fingerprints import fingerprint_of
from .foreign import ForeignPulls
from .host import ParentHost
from .intree import InTreePeers, StockRequests, has_stock_params
from .metrics import LEASED, LEASES, PLANS, QUARANTINED, Tally
from .options import TierConfigError, TierOptions
from .reader import Answer, Reader
from .source import Source
from .stats import connector_stats, definitions

logger = logging.getLogger("vllm.pointsman.tier")

CLOSE_TIMEOUT_S = 15.0
DRAIN_PAUSE_S = 0.001
DRAIN_WARNING_S = 5.0

_RESULTS = {Answer.HIT: LookupResult.HIT, Answer.MISS: LookupResult.MISS, Answer.RETRY: LookupResult.RETRY}


class PointsmanTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM has no types here
    """Never entered by two threads at once: the scheduler's, or vLLM's poll thread under its lock."""

    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.P2P
    tolerates_off_thread_polling: ClassVar[bool] = True
    """From vLLM 0.33 on: peers are also served between steps, from a thread that holds the manager's lock."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """
        Raises:
            TierConfigError: an option is unknown or unusable, or the spec is not ours.
        """
        if backpressure_detector is not None:
            raise TierConfigError(
                "PointsmanTier stores nothing, so it takes no backpressure; remove it from its entry"
            )
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self._options = TierOptions.load(options)
        self._control = _control_config(self._options, offloading_spec.config.parallel.data_parallel_index)
        self._transfer = TransferConfig.load(self._options.transfer)
        self._quarantine = _quarantine_of(offloading_spec)
        self._tally = Tally()
        self._chunk_tokens = {
            group.group_id: group.tokens_per_block * offloading_spec.blocks_per_chunk
            for group in offloading_spec.config.groups
        }
        report_config = read_report_config(offloading_spec.extra_config)
        self._view = primary_kv_view
        self._region: HostRegion | None = None
        self._exchange: Exchange | None = None
        self._in_tree: InTreePeers | None = None
        self._stock: StockRequests | None = None
        if self._options.p2p is not None:
            self._in_tree = InTreePeers(offloading_spec, primary_kv_view, self._options.p2p)
            self._stock = StockRequests(self._in_tree.tier, self._options.stock_lookup_s)
        self._results: list[JobResult] = []
        # Last, because nobody closes it for a tier that could not be built.
        self._reports = open_reports(report_config, next(iter(self._chunk_tokens.values())))

    # Consumer

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        now_s = time.monotonic()
        try:
            plan = read_plan(req_context.kv_transfer_params)
        except PlanError as error:
            self._tally.count(PLANS, "malformed")
            logger.warning("request %s: its plan is not carried out: %s", req_context.req_id, error)
            plan = None
        if plan is not None:
            self._tally.count(PLANS, "accepted" if plan.pulls else "without_pulls")
            self._open().reader.new_request(req_context.req_id, plan, now_s)
        if not has_stock_params(req_context):
            return RequestOffloadingContext()
        if self._stock is None:
            self._tally.count(PLANS, "stock_refused")
            return RequestOffloadingContext()
        planned = plan is not None and bool(plan.pulls)
        self._tally.count(PLANS, "stock_beside_plan" if planned else "stock")
        return self._stock.begin(req_context, planned=planned)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        end_token = req_context.get_offload_key_position(key)
        if self._exchange is not None and end_token is not None:
            start_token = end_token - self._chunk_tokens.get(get_offload_group_idx(key), end_token)
            reader = self._exchange.reader
            if reader.plans(req_context.req_id, start_token, end_token):
                now_s = time.monotonic()
                return _RESULTS[reader.lookup(req_context.req_id, key, start_token, end_token, now_s)]
        if self._stock is not None:
            return self._stock.lookup(key, req_context, time.monotonic())
        return LookupResult.MISS

    def submit_load(self, job_metadata: TransferJob) -> None:
        if (
            self._in_tree is not None
            and self._stock is not None
            and self._stock.loads(job_metadata.req_context)
        ):
            self._in_tree.tier.submit_load(job_metadata)
            return
        chunks = list(zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True))
        request_id = job_metadata.req_context.req_id
        self._open().reader.submit(request_id, job_metadata.job_id, chunks, time.monotonic())

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._exchange is not None:
            self._exchange.reader.finished(req_context.req_id, time.monotonic())
        if self._stock is not None:
            self._stock.end(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        now_s = time.monotonic()
        if self._exchange is not None:
            self._exchange.reader.flush(now_s)
            for request_id in context.new_req_ids:
                self._exchange.reader.scheduled(request_id, now_s)
        if self._in_tree is not None:
            self._in_tree.tier.on_schedule_end(context)

    # Source

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Nothing is kept here; the in-tree tier may have a decoder that waits for these chunks."""
        if self._in_tree is not None:
            self._in_tree.tier.submit_store(job_metadata)
        else:
            self._results.append(JobResult(job_id=job_metadata.job_id, success=True))

    def serve_external_requests(self, parent: ParentManager) -> None:
        if self._exchange is not None or _hash_root() is not None:
            exchange = self._open()
            exchange.source.serve(ParentHost(parent), exchange.link, time.monotonic())
        if self._in_tree is not None:
            self._in_tree.tier.serve_external_requests(parent)

    # Both

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._poll(time.monotonic())
        results, self._results = self._results, []
        return results

    def has_pending_work(self) -> bool:
        """Always: peers ask when they like, and vLLM looks at a tier only while it has work. It sleeps 1 ms a step."""
        return True

    def drain_jobs(self) -> None:
        """Returns when no pull writes and no peer reads: after a poll or two, or when the last lease ends."""
        started_s = time.monotonic()
        warned = False
        while self._exchange is not None and not self._exchange.quiesce(time.monotonic()):
            self._collect()
            if not warned and time.monotonic() - started_s > DRAIN_WARNING_S:
                logger.warning("a reset waits for %d leases of peers", self._exchange.source.leases)
                warned = True
            time.sleep(DRAIN_PAUSE_S)
        if self._in_tree is not None:
            self._in_tree.tier.drain_jobs()
        self._poll(time.monotonic())

    def shutdown(self) -> None:
        """
        Raises:
            RuntimeError: a transfer may still write into the region, which must then stay mapped.
        """
        self._reports.close(1.0)
        in_tree_closed = self._in_tree is None or self._in_tree.shutdown(CLOSE_TIMEOUT_S)
        if self._exchange is not None:
            if not self._exchange.link.close(CLOSE_TIMEOUT_S):
                raise RuntimeError(f"transfers into the host tier are not over after {CLOSE_TIMEOUT_S:g} s")
            self._exchange = None
        if self._region is not None:
            self._region.release()
        if not in_tree_closed:
            raise RuntimeError(f"vLLM's P2P tier is not closed after {CLOSE_TIMEOUT_S:g} s")

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return definitions()

    def get_stats(self) -> Any:
        source = self._exchange.source if self._exchange is not None else None
        gauges = {
            LEASES: source.leases if source is not None else 0,
            LEASED: source.pinned if source is not None else 0,
            QUARANTINED: len(self._quarantine.held),
        }
        return connector_stats(self._tally.take(), gauges)

    # Inside

    def _open(self) -> Exchange:
        """The link is opened at the first step: the root of the block hashes is known only after tiers are built."""
        if self._exchange is None:
            self._exchange = self._open_exchange()
        return self._exchange

    def _open_exchange(self) -> Exchange:
        options, config = self._options, self._offloading_spec.config
        fingerprint = fingerprint_of(
            config,
            block_bytes=self.block_size_bytes,
            hash_root=_hash_root() or b"",
            platform=current_platform.device_type,
            weights_revision=options.weights_revision,
            tenant=options.tenant,
        )
        boot = uuid.uuid4().hex
        pinned = HostRegion(self._view, self.block_size_bytes)
        try:
            link = open_link(self._control, self._transfer, fingerprint, pinned.region, boot_id=boot)
        except BaseException:
            pinned.release()
            raise
        self._region = pinned
        logger.info("peers reach this engine at %s, fingerprint %s", link.address, fingerprint)
        foreign = ForeignPulls(self._in_tree, self._quarantine, self._tally, options.linger_s)
        reader = Reader(
            link,
            self._quarantine,
            Account(self._tally, self._reports),
            foreign,
            block_bytes=self.block_size_bytes,
            longest_pull_s=options.longest_pull_s,
        )
        source = Source(
            boot,
            self._tally,
            patience_s=options.serve_patience_s,
            pinned_limit=int(pinned.region.blocks * options.serve_share),
            tenant=options.tenant,
        )
        return Exchange(link, reader, source)

    def _poll(self, now_s: float) -> None:
        if self._exchange is not None:
            self._exchange.poll(now_s)
        if self._in_tree is not None:
            for result in self._in_tree.tier.get_finished_jobs():
                if result.job_id < 0:
                    self._open().reader.foreign_ended(result.job_id, now_s, complete=result.success)
                else:
                    self._results.append(result)
        self._collect()

    def _collect(self) -> None:
        if self._exchange is None:
            return
        for done in self._exchange.reader.take_finished():
            self._results.append(
                JobResult(
                    job_id=done.job_id,
                    success=done.complete,
                    successful_keys=[OffloadKey(key) for key in done.arrived],
                    transfer_time=done.seconds,
                    transfer_bytes=done.size_bytes,
                )
            )
        for job_id in self._exchange.source.take_finished():
            self._results.append(JobResult(job_id=job_id, success=True))


def _hash_root() -> bytes | None:
    """Of all block hashes of this process. vLLM sets it after it has built the tiers."""
    root = getattr(kv_cache_utils, "NONE_HASH", None)
    return None if root is None else bytes(root)


def _control_config(options: TierOptions, data_parallel_index: int) -> ControlConfig:
    """One port per data-parallel engine, counted up from the configured one, as vLLM's own tier does."""
    config = ControlConfig.load(options.control)
    if not config.port or not data_parallel_index:
        return config
    return ControlConfig.load({**options.control, "port": config.port + data_parallel_index})


def _quarantine_of(spec: Any) -> Quarantine:
    found = getattr(spec, "quarantine", None)
    if isinstance(found, Quarantine):
        return found
    raise TierConfigError(
        f"PointsmanTier does not run under {type(spec).__name__}: late writes of a failed pull could land in chunks "
        'that are in use again; set "spec_name": "PointsmanOffloadingSpec" and "spec_module_path": '
        '"engine_ext.vllm.spec", or derive from it'
    )
