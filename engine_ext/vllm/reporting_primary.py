# SPDX-License-Identifier: Apache-2.0
"""Our primary tier where reports are wanted: the same, with every step of a planned request told to `visits.py`.

Stock gives secondary tiers the GPU's methods under other names (`CPUPrimaryTierOffloadingManager.__init__`):
`prepare_write` and `complete_write` fill a chunk from below, `complete_read` ends a copy downwards. They are not what
a request does, so those names are bound again here.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)

from .forgetting_primary import ForgettingPrimaryTier
from .plan import PlanError, read_plan
from .visits import HostVisits, Visit


class _NoPlan:
    """Kept in a request's context so that its parameters are looked at once."""


_NO_PLAN = _NoPlan()


class ReportingPrimaryTier(ForgettingPrimaryTier):
    """Takes the arguments of `ForgettingPrimaryTier`, all by name, and the visits."""

    def __init__(self, *, visits: HostVisits, **rest: Any) -> None:
        super().__init__(**rest)
        self._visits = visits
        self.prepare_write = self._prepare_write
        self.complete_write = self._complete_write
        self.complete_read = super().complete_load

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        result = super().lookup(key, req_context)
        if (visit := self._visit(req_context)) is not None:
            self._visits.looked_up(visit, key, found=result is not LookupResult.MISS)
        return result

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = super().prepare_load(keys, req_context)
        self._visits.read(keys)
        if (visit := self._visit(req_context)) is not None:
            self._visits.loading(visit, keys, time.monotonic())
        return spec

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        super().complete_load(keys, req_context)
        if (visit := self._visit(req_context)) is not None:
            self._visits.loaded(visit, keys, time.monotonic())

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        if (visit := self._visit(req_context)) is not None:
            self._visits.settle(visit)
        return self._prepare_write(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        super().on_request_finished(req_context)
        if (visit := self._visit(req_context)) is not None:
            self._visits.end(visit)

    def reset_cache(self) -> None:
        super().reset_cache()
        self._visits.forget()

    def shutdown(self) -> None:
        self._visits.close()
        super().shutdown()

    def _prepare_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, req_context)
        if output is not None and output.evicted_keys:
            self._visits.evicted(output.evicted_keys)
        return output

    def _complete_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        super().complete_store(keys, req_context, success)
        if success and (visit := self._visit(req_context)) is not None:
            self._visits.brought(visit, keys)

    def _visit(self, req_context: ReqContext) -> Visit | None:
        """The request's visit, begun by the first call that names it; None without a plan that can be read."""
        found: Visit | None = req_context.get_state(Visit)
        if found is not None or req_context.get_state(_NoPlan) is not None:
            return found
        try:
            plan = read_plan(req_context.kv_transfer_params)
        except PlanError:  # the peer tier says so
            plan = None
        if plan is None:
            req_context.set_state(_NO_PLAN)
            return None
        visit = self._visits.begin(req_context.req_id, plan.plan_id)
        req_context.set_state(visit)
        return visit
