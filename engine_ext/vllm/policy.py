# SPDX-License-Identifier: Apache-2.0
"""`PointsmanPolicy`: vLLM's hook for eviction from the host tier, over `eviction/`.

    "eviction_policy": "PointsmanPolicy", "cache_policy_module_path": "engine_ext.vllm.policy"

The router's hints are read once per request (`plan.py`). vLLM 0.32 tells a policy of a request's chunks when it stores
some and when it is done, 0.33 also when it loads some; whichever comes first, all chunks that the request's context
names are taken as read then, so that a long answer does not make its own prompt look old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from .eviction.core import NO_HINTS, EvictionCore
from .eviction.visits import Request
from .plan import EvictHints, PlanError, read_plan


@dataclass(slots=True)
class _Reading:
    """What one request has read; lies in its context."""

    owner: object
    generation: int
    seen: set[OffloadKey] = field(default_factory=set)
    chains: dict[int, Request[ChunkStatus]] = field(default_factory=dict)
    """By KV cache group."""


class PointsmanPolicy(CachePolicy):  # type: ignore[misc]  # vLLM has no types here
    """Cost-aware eviction. Not thread safe, as vLLM's own."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.core: EvictionCore[ChunkStatus] = EvictionCore(max(cache_capacity, 1))
        self.malformed_hints = 0
        """Requests whose plan could not be read: they count as without hints."""
        self.clock: Callable[[], float] = time.monotonic
        """Seconds; a replay puts its own here."""
        self._generation = 0

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self.core.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        """0.32 gives no context, and has told `on_store_miss` of the key; 0.33 does both."""
        self.core.insert(key, chunk, evictable=chunk.ref_cnt == 0)

    def remove(self, key: OffloadKey) -> None:
        self.core.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._read(list(keys), req_context)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._read(list(keys), req_context)

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._read(list(keys), req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        reading = self._read([key for group in key_groups for key in group], req_context)
        now_s = self.clock()
        for chain in reading.chains.values():
            self.core.finish(chain, now_s)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        return self.core.evict(n, protected)

    def clear(self) -> None:
        self.core.clear()
        self._generation += 1

    def mark_evictable(self, key: OffloadKey) -> None:
        self.core.mark_evictable(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self.core.mark_non_evictable(key)

    def _read(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> _Reading:
        reading: _Reading | None = req_context.get_state(_Reading)
        if reading is None or reading.owner is not self or reading.generation != self._generation:
            reading = _Reading(self, self._generation)
            req_context.set_state(reading)
            hints = self._hints(req_context)
            # All chunks of the prompt, in vLLM 0.32 and 0.33; without that attribute only those that were named.
            named: Iterable[OffloadKey] = getattr(req_context, "_offload_key_positions", ())
            keys = [*named, *keys]
        else:
            hints = NO_HINTS
            keys = [key for key in keys if key not in reading.seen]
        now_s = self.clock()
        for group, chain in _chains(keys, req_context, len(reading.seen)).items():
            request = reading.chains.get(group)
            if request is None:
                reading.chains[group] = self.core.visit(chain, now_s, hints)
            else:
                self.core.extend(request, chain, now_s)
        reading.seen.update(keys)
        return reading

    def _hints(self, req_context: ReqContext) -> EvictHints:
        try:
            plan = read_plan(req_context.kv_transfer_params)
        except PlanError:
            self.malformed_hints += 1
            return NO_HINTS
        return NO_HINTS if plan is None else plan.evict


def _chains(
    keys: Iterable[OffloadKey], req_context: ReqContext, place: int
) -> dict[int, list[tuple[OffloadKey, int]]]:
    """Keys by KV cache group, each in the order of the prompt.

    Where the context knows no positions they count in their order, one token each from `place` on.
    """
    chains: dict[int, list[tuple[OffloadKey, int]]] = {}
    for key in dict.fromkeys(keys):
        place += 1
        end_token = req_context.get_offload_key_position(key)
        chain = chains.setdefault(get_offload_group_idx(key), [])
        chain.append((key, place if end_token is None else end_token))
    for chain in chains.values():
        chain.sort(key=lambda one: one[1])
    return chains
