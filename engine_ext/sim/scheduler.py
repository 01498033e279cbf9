# SPDX-License-Identifier: Apache-2.0
"""Who computes what in the next step, and which HBM blocks that takes.

The rules of vLLM 0.32's ``v1/core/sched/scheduler.py`` and ``kv_cache_manager.py``: running requests first, then
requests whose load is over, then the queue in order of arrival; a step has a token budget, so a long prefill
comes in chunks; a request without room holds up the queue behind it; a running request without room preempts
the youngest. An HBM hit stops at n - 1 tokens (``get_computed_blocks``); an external hit may reach n, and then
the last token is computed again (``_update_waiting_for_remote_kv``).

Requests that only decode form the decode set, which is scheduled as a whole. Where it might lack blocks or budget,
it is dissolved and every request is scheduled by itself, as vLLM does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from engine_ext.sim.batch import Batch, Queue
from engine_ext.sim.book import BlockBook
from engine_ext.sim.config import SimConfig
from engine_ext.sim.decoding import DecodeSet
from engine_ext.sim.events import FULL_ATTENTION, BlockRemoved, BlockStored, KvEvent, Medium
from engine_ext.sim.holdings import Holdings
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
        pool: HbmPool,
        offload: Offloading,
        book: BlockBook,
        counters: SimCounters,
        decoding: DecodeSet,
        holdings: Holdings,
    ) -> None:
        self._config = config
        self._offload = offload
        self._book = book
        self._counters = counters
        self._holdings = holdings
        self._pool = pool
        self.decoding = decoding
        self.events: list[KvEvent] = []
        self.woken = False
        """A load has ended, so a step may be possible."""
        self.queue = Queue.OPEN
        """As the last ``schedule`` left it."""
        self._running: list[Live] = []
        self._alone: dict[Live, None] = {}
        """Running requests outside the decode set, oldest first."""
        self._admitted = 0
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

    def schedule(self, now_s: float) -> Batch:
        """The next step."""
        budget = self._config.max_num_batched_tokens
        due = self.decoding.take_due()
        preempted = False
        if self._all_fit(due, budget):
            batch = Batch(self._schedule_steady(due, budget), due, len(self.decoding))
        else:
            self._dissolve()
            parts, preempted = self._schedule_running(budget)
            batch = Batch(parts)
        self.queue = Queue.OPEN
        if not preempted:
            budget -= batch.decodes + sum(count for _, count in batch.parts)
            batch.parts += self._schedule_waiting(budget, now_s)
        return batch

    def can_extend(self, lives: Sequence[Live]) -> bool:
        """Whether there are blocks for all that are due in one step."""
        return len(lives) <= self._pool.free_blocks  # at most one for each

    def decodes(self, live: Live) -> None:
        """A running request has all tokens but one computed."""
        del self._alone[live]
        self.decoding.join(live, soon=self._offload.wants_to_store(live, live.computed + 1))

    def remove(self, live: Live, now_s: float) -> None:
        """A request has ended: its blocks become free, its tail first to be evicted."""
        if live.status is Status.RUNNING:
            self._running.remove(live)
            self._alone.pop(live, None)
            if live.decoding:
                self.decoding.leave(live)
        for queue in (self._waiting, self._loaded):
            if live in queue:
                queue.remove(live)
        self._offload.finish(live, now_s)
        self._pool.release(reversed(live.blocks))
        live.blocks = []
        live.status = Status.FINISHED

    def _all_fit(self, due: Sequence[Live], budget: int) -> bool:
        """Whether the decode set and the prefill under way fit into budget and blocks, in order of age."""
        budget -= len(self.decoding)
        if budget < 0 or len(self._alone) > 1:
            return False
        needed = len(due)  # at most one for each
        for live in self._alone:
            if live is not self._running[-1]:
                return False
            tokens = live.computed + min(live.num_tokens - live.computed, budget)
            needed += max(self.blocks_for(tokens) - len(live.blocks), 0)
        return needed <= self._pool.free_blocks

    def _schedule_steady(self, due: Sequence[Live], budget: int) -> list[tuple[Live, int]]:
        for live in due:
            self._extend(live, live.computed + 1)
        budget -= len(self.decoding)
        parts: list[tuple[Live, int]] = []
        for live in self._alone if budget else ():
            count = min(live.num_tokens - live.computed, budget)
            self._extend(live, live.computed + count)
            parts.append((live, count))
        return parts

    def _dissolve(self) -> None:
        """From now on every running request is scheduled by itself."""
        for live in self._running:
            if live.decoding:
                self.decoding.leave(live)
        self._alone = dict.fromkeys(self._running)

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
        full = False
        for queue in (self._loaded, self._waiting):
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
                self._admitted += 1
                live.order = self._admitted
                live.status = Status.RUNNING
                self._running.append(live)
                self._alone[live] = None
                scheduled.append((live, verdict))
                budget -= verdict
            queue.extendleft(reversed(skipped))
            if full:
                break
        self.queue = self._queue_state(full)
        return scheduled

    def _queue_state(self, full: bool) -> Queue:
        if len(self._running) >= self._config.max_num_seqs:
            return Queue.QUIET
        if all(live.deferred for queue in (self._loaded, self._waiting) for live in queue):
            return Queue.QUIET
        return Queue.BLOCKED if full else Queue.OPEN

    def _admit(self, live: Live, budget: int, now_s: float) -> int | None:
        """Tokens scheduled; 0 when deferred or loading; None when there is no room."""
        if not live.blocks:
            hbm = self._pool.match(live.hashes, (live.num_tokens - 1) // self._config.block_size_tokens)
            external = self._offload.find(live, len(hbm), now_s) if self._config.offloads else 0
            if external is None:
                return 0
            hit_blocks = len(hbm)
            total = hit_blocks + external
            room = self._pool.free_blocks - self._pool.idle(hbm)
            if self.blocks_for(live.num_tokens) - hit_blocks > room:
                return None  # vLLM admits a request only where its whole prompt fits
            if external and external > room - self._promised_blocks():
                return None
            self._pool.touch(hbm)
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

    def _load_done(self, live: Live, now_s: float) -> None:
        del self._loading[live]
        self.woken = True
        if live.aborted:
            self.remove(live, now_s)
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
        if missing > self._pool.free_blocks:
            return False
        if missing > 0:
            taken, evicted = self._pool.take(missing)
            live.blocks.extend(taken)
            for engine_hash in evicted:
                self.events.append(BlockRemoved((engine_hash,), Medium.GPU))
                self._holdings.evicted(engine_hash)
        if cache:
            self._cache(live, tokens)
        return True

    def _cache(self, live: Live, tokens: int) -> None:
        start, end = live.cached_blocks, min(tokens, live.num_tokens) // self._config.block_size_tokens
        if end <= start:
            return
        for block, engine_hash in zip(live.blocks[start:end], live.hashes[start:end], strict=True):
            self._pool.cache(block, engine_hash)
        self._book.note(live, start, end)
        live.cached_blocks = end
        self.events.append(
            BlockStored(
                block_hashes=tuple(live.hashes[start:end]),
                parent=live.hashes[start - 1] if start else None,
                token_ids=live.block_tokens(start, end),
                block_size_tokens=self._config.block_size_tokens,
                medium=Medium.GPU,
                extra_keys=live.keys_between(start, end),
                lora_id=live.request.lora_id,
                lora_name=live.request.lora_name,
                spec_kind=FULL_ATTENTION,
                session_id=live.request.session_id,
            )
        )

    def _preempt(self, live: Live) -> None:
        """Out of blocks: the youngest request gives up all of its own and starts again."""
        self._alone.pop(live, None)
        self._pool.release(reversed(live.blocks))
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
