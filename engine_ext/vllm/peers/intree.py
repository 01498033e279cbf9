# SPDX-License-Identifier: Apache-2.0
"""vLLM's own P2P tier inside ours: peers without the extension, as sources and as consumers.

It is used as it is, through what every tier has: a pull becomes a request of its own with `remote_kv_source`
parameters, so that one request of the engine can pull from several such peers. Ids of our load jobs are negative and
the engine's are not, so the results of both come out of one list without being confused.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.p2p.manager import P2PSecondaryTierManager

STOCK_KEYS = ("remote_kv_source", "remote_prefiller", "remote_decoder")
_KNOWN = {LookupResult.HIT: True, LookupResult.MISS: False}


def has_stock_params(req_context: ReqContext) -> bool:
    """Whether a request names an in-tree peer by itself, without a plan."""
    params = req_context.kv_transfer_params or {}
    return any(key in params for key in STOCK_KEYS)


class InTreePeers:
    """`ForeignPeers` over `P2PSecondaryTierManager`."""

    def __init__(self, spec: Any, view: memoryview, options: Mapping[str, Any]) -> None:
        self.tier = P2PSecondaryTierManager(
            offloading_spec=spec, primary_kv_view=view, tier_type="p2p", **options
        )
        self._last_id = 0

    def open(self, name: str, address: str) -> ReqContext | None:
        host, _, port = address.rpartition(":")
        source = {"kv_request_id": name, "remote_host": host, "remote_port": port}
        request = ReqContext(req_id=name, kv_transfer_params={"remote_kv_source": source})
        self.tier.on_new_request(request)
        return request

    def lookup(self, handle: ReqContext, key: bytes) -> bool | None:
        return _KNOWN.get(self.tier.lookup(OffloadKey(key), handle))

    def load(self, handle: ReqContext, chunks: Mapping[bytes, int]) -> int:
        self._last_id -= 1
        job = TransferJob(
            job_id=self._last_id,
            keys=[OffloadKey(key) for key in chunks],
            chunk_ids=np.array(list(chunks.values()), dtype=np.int32),
            is_promotion=True,
            req_context=handle,
        )
        self.tier.submit_load(job)
        return self._last_id

    def close(self, handle: ReqContext) -> None:
        self.tier.on_request_finished(handle)

    def shutdown(self, timeout_s: float) -> bool:
        """Whether it is closed. Where it has something to say to a peer that is gone, its socket never closes."""
        closing = threading.Thread(target=self.tier.shutdown, name="pointsman-p2p-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
        return not closing.is_alive()


@dataclass(slots=True)
class _Stock:
    ignored: bool
    until_s: float | None = None


class StockRequests:
    """Requests that name an in-tree peer by themselves. Times are on one monotonic clock."""

    def __init__(self, tier: P2PSecondaryTierManager, lookup_limit_s: float) -> None:
        self._tier = tier
        self._lookup_limit_s = lookup_limit_s
        self._requests: dict[str, _Stock] = {}

    def begin(self, req_context: ReqContext, *, planned: bool) -> RequestOffloadingContext:
        """A plan with sources comes first: then nothing is asked here, but a decoder is still served."""
        self._requests[req_context.req_id] = _Stock(ignored=planned)
        return self._tier.on_new_request(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext, now_s: float) -> LookupResult:
        """A peer that does not answer is a MISS after the limit; vLLM 0.32 would wait for ever."""
        stock = self._requests.get(req_context.req_id)
        if stock is None or stock.ignored:
            return LookupResult.MISS
        result = self._tier.lookup(key, req_context)
        if result is not LookupResult.RETRY:
            return result
        if stock.until_s is None:
            stock.until_s = now_s + self._lookup_limit_s
        return result if now_s < stock.until_s else LookupResult.MISS

    def loads(self, req_context: ReqContext) -> bool:
        """Whether load jobs of this request are the in-tree tier's."""
        stock = self._requests.get(req_context.req_id)
        return stock is not None and not stock.ignored

    def end(self, req_context: ReqContext) -> None:
        if self._requests.pop(req_context.req_id, None) is not None:
            self._tier.on_request_finished(req_context)
