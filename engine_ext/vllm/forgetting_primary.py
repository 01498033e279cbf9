# SPDX-License-Identifier: Apache-2.0
"""Our primary tier, which gives up the chunks of an adapter's former weights when the adapter is loaded anew.

A chunk that is being read or written stays until it is evicted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey, PrepareStoreOutput, ReqContext

from .adapters.former import AdapterBlocks, Weights
from .adapters.revisions import AdapterRevisions
from .quarantined_primary import QuarantinedPrimaryTier


class ForgettingPrimaryTier(QuarantinedPrimaryTier):
    """Takes the arguments of `QuarantinedPrimaryTier`, all by name, and the adapters' revisions."""

    def __init__(self, *, adapters: AdapterRevisions, **rest: Any) -> None:
        super().__init__(**rest)
        self._adapters = adapters
        self._of_adapters: AdapterBlocks[OffloadKey, None] = AdapterBlocks()

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        output: PrepareStoreOutput | None = super().prepare_store(keys, req_context)
        if output is not None and output.keys_to_store:
            for key in output.evicted_keys:
                self._of_adapters.gone(key)
            weights = self._adapters.weights_of(req_context.req_id)
            if weights is not None:
                for key in output.keys_to_store:
                    self._of_adapters.note(key, None, weights)
        return output

    def forget_former(self, now: Weights) -> int:
        """Gives up what is held of this adapter's former weights; how many chunks."""
        given_up: list[OffloadKey] = []
        for key, _ in self._of_adapters.loaded(now):
            chunk = self._policy.get(key)
            if chunk is not None and chunk.ref_cnt == 0:
                self._policy.mark_non_evictable(key)
                self._num_evictable_cache_chunks -= 1
                self._policy.remove(key)
                self._free_chunk(chunk)
                given_up.append(key)
        if given_up and self.events is not None:
            self.events.append(OffloadingEvent(keys=given_up, medium=self.medium, removed=True))
        return len(given_up)

    def reset_cache(self) -> None:
        super().reset_cache()
        self._of_adapters.clear()
