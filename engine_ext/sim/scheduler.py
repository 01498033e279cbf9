# SPDX-License-Identifier: Apache-2.0
"""Who computes what in the next step, and which HBM blocks that takes.

The rules of vLLM 0.32's ``v1/core/sched/scheduler.py`` and ``kv_cache_manager.py``: running requests first, then
requests whose load is over, then the queue in order of arrival; a step has a token budget, so a long prefill
comes in chunks; a request without room holds up the queue behind it; a running request without room preempts
the youngest. An HBM hit stops at n - 1 tokens (``get_computed_blocks``); an external hit may reach n, and then
the last token is computed again (``_update_waiting_for_remote_kv``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from engine_ext.sim.book import BlockBook
from engine_ext.sim.config import SimConfig
from engine_ext.sim.events import FULL_ATTENTION, BlockRemoved, BlockStored, KvEvent, Medium
from engine_ext.sim.offload import Offloading
from engine_ext.sim.output import SimCounters
from engine_ext.sim.pool import HbmPool
from engine_ext.sim.request import Live, Status, Tier


class Scheduler:
    """Queues and HBM of one engine. ``events`` is drained by the core."""

    def __init__(
        self,
        *,
        config: SimConfig,
        offload: Offloading,
        book: BlockBook,
        counters: SimCounters,
        forget: Callable[[bytes], None],
    ) -> None:
        """``forget`` is told of every block that HBM let go."""
        self._config = config
        self._offload = offload
        self._book = book
        self._counters = counters
        self._forget = forget
        self.pool = HbmPool(config.hbm_blocks)
        self.events: list[KvEvent] = []
        self.woken = False
        """A load has ended, so a step may be possible."""
        self._running: list[Live] = []
        self._waiting: deque[Live] = deque()
        self._loading: dict[Live, None] = {}
        self._loaded: deque[Live] = deque()

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue, or waiting for a load."""
        return len(self._waiting) + len(self._loading) + len(self._loaded)

    def add(self, live: Live) -> None:
        """A new request joins the queue."""
        self._waiting.append(live)

    def schedule(self, now_s: float) -> list[tuple[Live, int]]:
        """The next step: requests and how many tokens of each are computed."""
        budget = self._config.max_num_batched_tokens
        scheduled, preempted = self._schedule_running(budget)
        if not preempted:
            scheduled += self._schedule_waiting(budget - sum(count for _, count in scheduled), now_s)
        return scheduled

    def remove(self, live: Live) -> None:
        """A request has ended: its blocks become free, its tail first to be evicted."""
        if live.status is Status.RUNNING:
            self._running.remove(live)
        for queue in (self._waiting, self._loaded):
            if live in queue:
                queue.remove(live)
        self._offload.finish(live)
        self.pool.release(reversed(live.blocks))
        live.blocks = []
        live.status = Status.FINISHED

    def _schedule_running(self, budget: int) -> tuple[list[tuple[Live, int]], bool]:
        scheduled: list[tuple[Live, int]] = []
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            live = self._running[index]
            count = min(live.num_tokens - live.computed, budget)
            while not self._extend(live, live.computed + count):
                victim = self._running.pop()
                self._preempt(victim)
                preempted = True
                if victim is live:
                    return scheduled, True
            scheduled.append((live, count))
            budget -= count
            index += 1
        return scheduled, preempted

    def _schedule_waiting(self, budget: int, now_s: float) -> list[tuple[Live, int]]:
        """Requests whose load is over go first, then the queue; a request without room holds up the rest."""
        scheduled: list[tuple[Live, int]] = []
        for queue in (self._loaded, self._waiting):
            full = False
            skipped: list[Live] = []
            while queue and budget > 0 and len(self._running) < self._config.max_num_seqs:
                live = queue[0]
                if live.deferred:
                    skipped.append(queue.popleft())
                    continue
                verdict = self._admit(live, budget, now_s)
                if verdict is None:
                    full = True
                    break
                queue.popleft()
                if verdict == 0:
                    if live.status is Status.WAITING:
                        skipped.append(live)
                    continue
                live.status = Status.RUNNING
                self._running.append(live)
                scheduled.append((live, verdict))
                budget -= verdict
            queue.extendleft(reversed(skipped))
            if full:
                break
        return scheduled

    def _admit(self, live: Live, budget: int, now_s: float) -> int | None:
        """Tokens scheduled; 0 when deferred or loading; None when there is no room."""
        if not live.blocks:
            hbm = self.pool.match(live.hashes, (live.num_tokens - 1) // self._config.block_size_tokens)
            external = self._offload.find(live, len(hbm), now_s) if self._config.offloads else 0
            if external is None:
                return 0
            hit_blocks = len(hbm)
            total = hit_blocks + external
            room = self.pool.free_blocks - self.pool.idle(hbm)
            if self.blocks_for(live.num_tokens) - hit_blocks > room:
                return None  # vLLM admits a request only where its whole prompt fits
            if external and external > room - self._promised_blocks():
                return None
            self.pool.touch(hbm)
            live.blocks = hbm
            live.cached_blocks = hit_blocks
            self._count_hits(live, hit_blocks, external)
            if external:
                self._extend(live, total * self._config.block_size_tokens, cache=False)
                live.computed = total * self._config.block_size_tokens
                live.status = Status.LOADING
                self._loading[live] = None
                self._offload.load(live, hit_blocks, total, now_s, partial(self._load_done, live))
                return 0
            live.computed = hit_blocks * self._config.block_size_tokens
        count = min(live.num_tokens - live.computed, budget)
        return count if self._extend(live, live.computed + count) else None

    def _load_done(self, live: Live, _now_s: float) -> None:
        del self._loading[live]
        self.woken = True
        if live.aborted:
            self.remove(live)
            return
        self._cache(live, live.computed)
        if live.computed == live.num_tokens:
            live.computed -= 1
        live.status = Status.WAITING
        self._loaded.append(live)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens take."""
        return -(-tokens // self._config.block_size_tokens)

    def _promised_blocks(self) -> int:
        """Blocks that requests in the middle of their prefill still need: a load must leave them free."""
        waiting = (
            live
            for live in (*self._running, *self._loading, *self._loaded)
            if live.computed < live.prompt_tokens
        )
        return sum(self.blocks_for(live.num_tokens) - len(live.blocks) for live in waiting)

    def _extend(self, live: Live, tokens: int, *, cache: bool = True) -> bool:
        """Give a request the blocks for its first ``tokens`` tokens and announce those that are full."""
        missing = self.blocks_for(tokens) - len(live.blocks)
        if missing > self.pool.free_blocks:
            return False
        if missing > 0:
            taken, evicted = self.pool.take(missing)
            live.blocks.extend(taken)
            for engine_hash in evicted:
                self.events.append(BlockRemoved((engine_hash,), Medium.GPU))
                self._forget(engine_hash)
        if cache:
            self._cache(live, tokens)
        return True

    def _cache(self, live: Live, tokens: int) -> None:
        start, end = live.cached_blocks, min(tokens, live.num_tokens) // self._config.block_size_tokens
        if end <= start:
            return
        for index in range(start, end):
            self.pool.cache(live.blocks[index], live.hashes[index])
        self._book.note(live, start, end)
        live.cached_blocks = end
        self.events.append(
            BlockStored(
                block_hashes=tuple(live.hashes[start:end]),
                parent=live.hashes[start - 1] if start else None,
                token_ids=live.block_tokens(start, end),
                block_size_tokens=self._config.block_size_tokens,
                medium=Medium.GPU,
                extra_keys=tuple(live.keys_of(index) for index in range(start, end)),
                lora_id=live.request.lora_id,
                lora_name=live.request.lora_name,
                spec_kind=FULL_ATTENTION,
                session_id=live.request.session_id,
            )
        )

    def _preempt(self, live: Live) -> None:
        """Out of blocks: the youngest request gives up all of its own and starts again."""
        self.pool.release(reversed(live.blocks))
        live.blocks, live.cached_blocks, live.computed = [], 0, 0
        live.status = Status.WAITING
        live.preemptions += 1
        self._counters.preemptions += 1
        self._waiting.appendleft(live)

    def _count_hits(self, live: Live, hbm_blocks: int, external_blocks: int) -> None:
        """Usage and counters speak of the first admission only, as vLLM's ``prefill_stats``."""
        if live.counted:
            return
        live.counted = True
        size = self._config.block_size_tokens
        live.cached_by_tier[Tier.HBM] = hbm_blocks * size
        for engine_hash in live.hashes[hbm_blocks : hbm_blocks + external_blocks]:
            live.cached_by_tier[live.came_from.get(engine_hash, Tier.RAM)] += size
        counters = self._counters
        counters.prompt_tokens += live.prompt_tokens
        counters.prefix_cache_queries += live.num_tokens
        counters.prefix_cache_hits += hbm_blocks * size
        if self._config.offloads:
            counters.external_queries += live.num_tokens - hbm_blocks * size
            counters.external_hits += external_blocks * size
        for tier, tokens in live.cached_by_tier.items():
            counters.cached_by_tier[tier] += tokens
