# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiers as the source role sees them: an adapter from `ParentManager` to `source.Host`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import ParentManager

from engine_ext.vllm.plan import PLAN_KEY, PLAN_VERSION

from .source import Presence

_PRESENCE = {
    LookupResult.HIT: Presence.HERE,
    LookupResult.HIT_PENDING: Presence.COMING,
    LookupResult.RETRY: Presence.COMING,
    LookupResult.MISS: Presence.ABSENT,
}


class ParentHost:
    """Valid during one `serve_external_requests`."""

    def __init__(self, parent: ParentManager) -> None:
        self._parent = parent

    def begin(self, name: str, tenant: str) -> ReqContext:
        """A request without pulls of its own; its plan tells other tiers and the eviction policy whose it is."""
        plan = {"version": PLAN_VERSION, "plan_id": name, "tenant": tenant}
        request = ReqContext(req_id=name, kv_transfer_params={PLAN_KEY: plan})
        self._parent.on_new_request(request)
        return request

    def lookup(self, request: ReqContext, key: bytes) -> Presence:
        return _PRESENCE[self._parent.lookup(OffloadKey(key), request)]

    def pin(self, request: ReqContext, keys: Sequence[bytes]) -> tuple[int, Sequence[int]]:
        job: Any = self._parent.create_store_job([OffloadKey(key) for key in keys], request)
        return job.job_id, job.chunk_ids.tolist()

    def end(self, request: ReqContext) -> None:
        self._parent.on_request_finished(request)
