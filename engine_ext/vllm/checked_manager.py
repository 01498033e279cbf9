# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiering manager, except that it stores no block of an adapter that was replaced while its request ran, and
gives up those of an adapter's former weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from .adapters.former import Weights
from .adapters.revisions import AdapterRevisions


class CheckedManager(TieringOffloadingManager):  # type: ignore[misc]  # vLLM has no types here
    """Takes the arguments of `TieringOffloadingManager`, all by name, and the adapters' revisions."""

    def __init__(self, *, adapters: AdapterRevisions, **stock: Any) -> None:
        super().__init__(**stock)
        self._adapters = adapters
        adapters.listen(self.adapter_loaded)

    def adapter_loaded(self, now: Weights) -> None:
        """On the scheduler's thread, which 0.33's tier thread has to leave alone for as long."""
        with getattr(self, "lock", None) or contextlib.nullcontext():
            self.primary_tier.forget_former(now)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        kept = keys if self._adapters.may_store(req_context.req_id) else ()
        return super().prepare_store(kept, req_context)
