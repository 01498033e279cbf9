# SPDX-License-Identifier: Apache-2.0
"""Random requests on vLLM's own CPUOffloadingManager with PointsmanPolicy, in the engine's venv, without an engine.

After every step the manager's count of chunks that may go and the policy's are compared, and no chunk id may belong to
two chunks. Prints what happened as one line of JSON.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

CHUNKS = 40
MALFORMED: tuple[Any, ...] = (7, {"version": 9, "plan_id": "p"}, {"plan_id": "p", "evict": {"reuse": -1}})


class Rounds:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.manager = CPUOffloadingManager(
            num_chunks=CHUNKS,
            cache_policy="PointsmanPolicy",
            cache_policy_module_path="engine_ext.vllm.policy",
            enable_events=True,
        )
        self.policy: Any = self.manager._policy
        self.held: set[OffloadKey] = set()
        self.counts = dict.fromkeys(("evicted", "refused", "hits", "failed", "malformed", "resets"), 0)
        self.loading: list[tuple[ReqContext, list[OffloadKey]]] = []
        self.conversations: list[list[int]] = []

    def play(self, requests: int) -> None:
        for number in range(requests):
            self.request(number)
            if self.random.random() < 0.005:
                self.loading.clear()
                self.manager.reset_cache()
                self.held.clear()
                self.counts["resets"] += 1
            self.check()

    def request(self, number: int) -> None:
        random, manager = self.random, self.manager
        context = ReqContext(f"r{number}", self.parameters())
        manager.on_new_request(context)
        keys = self.keys(self.blocks(), context, described=random.random() < 0.9)
        hits = 0
        for key in keys:
            if manager.lookup(key, context) is not LookupResult.HIT:
                break
            assert key in self.held
            hits += 1
        self.counts["hits"] += hits
        if hits:
            manager.prepare_load(keys[:hits], context)
            self.loading.append((context, keys[:hits]))
        for first in range(hits, len(keys), 4):
            self.store(keys[first : first + 4], context)
            self.check()
        while len(self.loading) > random.randrange(8):
            loaded, chunks = self.loading.pop(0)
            manager.complete_load(chunks, loaded)
        manager.on_request_finished(context)

    def store(self, keys: list[OffloadKey], context: ReqContext) -> None:
        output = self.manager.prepare_store(keys, context)
        if output is None:
            self.counts["refused"] += 1
            return
        assert not set(output.evicted_keys) & set(keys)
        self.held -= set(output.evicted_keys)
        self.counts["evicted"] += len(output.evicted_keys)
        self.check()
        stored = self.random.random() < 0.95
        if output.keys_to_store:
            self.manager.complete_store(output.keys_to_store, context, success=stored)
        self.held |= set(output.keys_to_store) if stored else set()
        self.counts["failed"] += not stored

    def check(self) -> None:
        core = self.policy.core
        assert core.evictable == self.manager._num_evictable_cache_chunks
        assert core.held + self.manager._get_num_free_chunks() == CHUNKS
        slots = [self.policy.get(key).chunk_id for key in self.held]
        assert len(set(slots)) == len(slots)

    def blocks(self) -> list[int]:
        random = self.random
        if not self.conversations or random.random() < 0.4:
            self.conversations.append([random.randrange(2)])
        recent = self.conversations[-8:]
        chosen = random.choice(recent)
        chosen.extend(random.randrange(2, 1 << 40) for _ in range(random.randrange(1, 5)))
        return chosen

    def keys(self, blocks: list[int], context: ReqContext, *, described: bool) -> list[OffloadKey]:
        """Two KV cache groups: their chunks alternate."""
        keys = []
        for place, block in enumerate(blocks, start=1):
            for group in (0, 1):
                keys.append(make_offload_key(block.to_bytes(32, "big"), group))
                if described:
                    context.set_offload_key_position(keys[-1], 16 * place)
        return keys

    def parameters(self) -> dict[str, Any] | None:
        kind = self.random.randrange(4)
        if kind == 0:
            self.counts["malformed"] += 1
            return {"pointsman": self.random.choice(MALFORMED)}
        evict = {
            "rebuild_s": 0.1,
            "reuse": 2.0,
            "pinned_tokens": 16,
            "private_from_token": 48,
            "peer_copies": 1,
        }
        return {"pointsman": {"plan_id": "p", "evict": evict}} if kind == 1 else None


def main() -> None:
    totals: dict[str, int] = {}
    for seed in range(5):
        rounds = Rounds(seed)
        rounds.play(300)
        rounds.counts["counted_malformed"] = rounds.policy.malformed_hints
        for name, count in rounds.counts.items():
            totals[name] = totals.get(name, 0) + count
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
