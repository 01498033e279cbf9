# SPDX-License-Identifier: Apache-2.0
"""The extension's spec and its manager on vLLM's own tiering manager; what a start is refused with; the plugin.

Played by extension_scenarios.py in the engine's venv.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Self

import torch
from offloading import EXTRA, offloading_config, shared_files
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    LookupResult,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from engine_ext.vllm import manager as manager_module
from engine_ext.vllm import plugin
from engine_ext.vllm.quarantined_primary import MALFORMED_HINTS
from engine_ext.vllm.spec import PointsmanOffloadingSpec


class InstantTier(SecondaryTierManager):  # type: ignore[misc]
    """Holds every chunk of which the key begins with 9, and brings it at once."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._done: list[JobResult] = []

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.HIT if key[0] == 9 else LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        self._done.append(JobResult(job_metadata.job_id, True))

    submit_store = submit_load

    def get_finished_jobs(self) -> list[JobResult]:
        done, self._done = self._done, []
        return done

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None: ...


def reporting() -> dict[str, Any]:
    """What a planned request and one without a plan tell the router, through vLLM's own manager."""
    sys.modules["instant_tier"] = sys.modules[__name__]
    calls: list[list[Any]] = []

    class Sink:
        def __getattr__(self, name: str) -> Any:
            return lambda *said: calls.append([name, *said])

    real, manager_module.open_reports = manager_module.open_reports, lambda config, tokens: Sink()
    tier = {"type": "InstantTier", "module_path": "instant_tier"}
    extra = {"cpu_bytes_to_use": 4 * 8192, "secondary_tiers": [tier], "report_urls": ["http://127.0.0.1:9"]}
    spec = PointsmanOffloadingSpec(offloading_config(EXTRA | extra, block_bytes=5000))
    one = spec.get_manager()
    manager_module.open_reports = real
    mine, pulled, new = (make_offload_key(bytes([n]) * 32, 0) for n in (1, 9, 2))
    step = ScheduleEndContext((), ())

    def request(name: str, plan: dict[str, Any] | None) -> ReqContext:
        context = ReqContext(name, {"pointsman": plan} if plan else None)
        one.on_new_request(context)
        return context

    with one.lock if spec.traits.manager_has_lock else contextlib.nullcontext():
        before = request("before", None)
        one.prepare_store([mine], before)
        one.complete_store([mine], before)
        one.on_request_finished(before)
        planned = request("planned", {"plan_id": "p"})
        first = [one.lookup(key, planned).name for key in (mine, pulled, new)]
        one.on_schedule_end(step)
        again = [one.lookup(key, planned).name for key in (mine, pulled)]
        one.prepare_load([mine], planned)
        one.complete_load({mine}, planned)
        one.prepare_store([new], planned)
        one.complete_store([new], planned)
        one.on_request_finished(planned)
        one.on_schedule_end(step)
        crowd = request("crowd", {"plan_id": "malformed", "version": 7})
        keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(20, 24)]
        one.prepare_store(keys, crowd)
        one.complete_store(keys, crowd)
        one.on_request_finished(crowd)
        one.on_schedule_end(step)
        one.on_schedule_end(step)
    one.shutdown()
    seconds = [call.pop() for call in calls if call[0] == "promoted"]
    return {
        "first": first,
        "again": again,
        "calls": calls,
        "seconds": seconds,
        "chunk_bytes": spec.kv_bytes_per_chunk,
    }


def hints() -> dict[str, Any]:
    """What the stats of a manager with our policy say of plans that cannot be read."""
    policy = {"eviction_policy": "PointsmanPolicy", "cache_policy_module_path": "engine_ext.vllm.policy"}
    spec = PointsmanOffloadingSpec(offloading_config(EXTRA | policy | {"cpu_bytes_to_use": 4 * 4096}))
    one = spec.get_manager()
    told = []
    with one.lock if spec.traits.manager_has_lock else contextlib.nullcontext():
        for number in range(3):
            context = ReqContext(f"r{number}", {"pointsman": {"plan_id": "p", "version": 7 if number else 1}})
            one.on_new_request(context)
            key = make_offload_key(bytes([number]) * 32, 0)
            one.prepare_store([key], context)
            one.complete_store([key], context)
            one.on_request_finished(context)
            told.append(sum(one.get_stats()._values.get(MALFORMED_HINTS, {}).values()))
    one.shutdown()
    return {"told": told, "defined": MALFORMED_HINTS in spec.build_metric_definitions(spec.extra_config)}


class BrokenTier(SecondaryTierManager):  # type: ignore[misc]
    """Cannot be built, but sees the spec first."""

    seen: list[Any] = []  # noqa: RUF012 - of the one test that uses it

    def __new__(cls, offloading_spec: Any, primary_kv_view: memoryview, **_: Any) -> Self:
        cls.seen += [offloading_spec.quarantine, primary_kv_view]
        raise RuntimeError("no tier today")


def manager() -> dict[str, Any]:
    """The manager's primary tier is ours; chunks held in quarantine are handed out only once released."""
    config = offloading_config(EXTRA | {"cpu_bytes_to_use": 4 * 4096})
    spec = PointsmanOffloadingSpec(config)
    one = spec.get_manager()
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(8)]
    context = ReqContext("r")
    with one.lock if spec.traits.manager_has_lock else memoryview(b""):
        one.on_new_request(context)
        first = one.prepare_store(keys[:4], context).store_spec.block_ids.tolist()
        spec.quarantine.hold(first[:1])
        one.complete_store(keys[:4], context, success=False)
        full = one.prepare_store(keys[4:8], context) is None
        spec.quarantine.release(first[:1])
        again = sorted(one.prepare_store(keys[4:8], context).store_spec.block_ids.tolist())
        one.complete_store(keys[4:8], context)
    result = {
        "same": spec.get_manager() is one,
        "primary": type(one.primary_tier).__name__,
        "full_while_held": full,
        "again": again,
        "view": list(one.primary_tier.get_kv_memoryview().shape),
    }
    one.shutdown()
    return result | {"left": shared_files(config.engine_id)}


def broken() -> dict[str, Any]:
    """A tier that cannot be built leaves no region behind, and the quarantine was there before it."""
    sys.modules["broken_tier"] = sys.modules[__name__]
    tier = {"type": "BrokenTier", "module_path": "broken_tier"}
    config = offloading_config(EXTRA | {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]})
    spec = PointsmanOffloadingSpec(config)
    try:
        spec.get_manager()
    except RuntimeError as error:
        said = str(error)
    quarantine, view = BrokenTier.seen
    try:
        bytes(view[:1])
        released = False
    except ValueError:
        released = True
    return {
        "said": said,
        "saw": quarantine is spec.quarantine,
        "released": released,
        "left": shared_files(config.engine_id),
    }


def refusals() -> dict[str, str]:
    """What a start is refused with."""

    def refused(extra: dict[str, Any], then: Callable[[Any], object] = lambda _: None) -> str:
        try:
            then(PointsmanOffloadingSpec(offloading_config(EXTRA | {"cpu_bytes_to_use": 1 << 20} | extra)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    meta = CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.empty((4, 64), dtype=torch.int8, device="meta"), 64)],
        [[CanonicalKVCacheRef(0, 64)]],
    )
    return {
        "small": refused({"cpu_bytes_to_use": 100}, lambda spec: spec.get_manager()),
        "small for a worker": refused({"cpu_bytes_to_use": 100}, lambda spec: spec.get_worker(meta)),
        "vllm": refused({"promotion": "vllm"}),
        "typo": refused({"promotion": "gpu"}),
        "elsewhere": refused({}, lambda spec: spec.get_worker(meta)),
    }


def unknown() -> dict[str, Any]:
    """An unknown vLLM: refused by the spec, ignored by the plugin, accepted where the operator says so."""
    import vllm.version

    real, vllm.version.__version__ = vllm.version.__version__, "0.99.1"
    try:
        given = EXTRA | {"cpu_bytes_to_use": 1 << 20}
        try:
            PointsmanOffloadingSpec(offloading_config(given))
        except RuntimeError as error:
            said = str(error)
        plugin.register()
        unregistered = names()
        allowed = PointsmanOffloadingSpec(offloading_config(given | {"pointsman_allow_unknown_vllm": True}))
    finally:
        vllm.version.__version__ = real
    plugin.register()
    plugin.register()
    ours = ("engine_ext.vllm.tier", "engine_ext.vllm.policy")
    return {
        "imported": [one for one in ours if one in sys.modules],
        "said": said,
        "unregistered": unregistered,
        "as": allowed.traits.version,
        "registered": names(),
    }


def names() -> list[str]:
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    factories = (OffloadingSpecFactory, SecondaryTierFactory, CachePolicyFactory)
    return [name for one in factories for name in one._registry if name.startswith("Pointsman")]
