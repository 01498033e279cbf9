# SPDX-License-Identifier: Apache-2.0
"""The simulated engine: a discrete-event core whose clock is an argument. No I/O, no randomness.

    submit / abort / answer_lookup        say what happened, at a time
    next_event_s                          when advance has something to do; None when idle
    advance(now_s)                        do it, in order of time; returns what came out

Blocks are announced when their tokens are scheduled and published when the step ends, GPU events before those
of the lower tiers, one message per step (vLLM 0.32, ``Scheduler.update_from_output``). Times never go
backwards. Memory is bounded by the tiers' capacity and the requests in flight.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine_ext.sim.agenda import Agenda
from engine_ext.sim.book import BlockBook
from engine_ext.sim.config import SimConfig
from engine_ext.sim.errors import KvRequestIdInUseError, PromptTooLongError
from engine_ext.sim.events import AllBlocksCleared
from engine_ext.sim.hashing import root_hash
from engine_ext.sim.offload import Offloading
from engine_ext.sim.output import (
    BlockTruth,
    Finished,
    PeerAnswer,
    SimCounters,
    SimMetrics,
    SimUsage,
    StepOutput,
    TokenOutput,
)
from engine_ext.sim.profile import SimProfile
from engine_ext.sim.request import Live, SimRequest, Status, make_live
from engine_ext.sim.scheduler import Scheduler
from engine_ext.sim.tiers import StorageTier


class SimEngine:
    """One engine: scheduler, HBM pool and lower tiers."""

    def __init__(self, config: SimConfig, profile: SimProfile, storage: StorageTier | None = None) -> None:
        """``storage`` lets several engines share one store; otherwise ``config.storage_blocks`` makes one."""
        self.config = config
        self.profile = profile
        self.root = root_hash(config.hash_seed)
        self.max_model_len = min(config.max_model_len, (config.hbm_blocks - 1) * config.block_size_tokens)
        self.asleep = False
        if storage is None and config.storage_blocks:
            storage = StorageTier(config.storage_blocks)
        self._storage = storage
        self._counters = SimCounters()
        self._book = BlockBook(config.track_identity)
        self._agenda = Agenda()
        self._offload = Offloading(
            config=config,
            profile=profile,
            agenda=self._agenda,
            book=self._book,
            counters=self._counters,
            storage=storage,
            forget=self._forget_unless_held,
        )
        self._scheduler = Scheduler(
            config=config,
            offload=self._offload,
            book=self._book,
            counters=self._counters,
            forget=self._forget_unless_held,
        )
        self._lives: dict[str, Live] = {}
        self._kv_request_ids: set[str] = set()
        self._batch: list[tuple[Live, int]] = []
        self._step_end_s: float | None = None
        self._wake_s: float | None = None

    # What happens to the engine

    def submit(self, request: SimRequest, now_s: float) -> None:
        """A request arrives.

        Raises:
            PromptTooLongError: it leaves no room for an output token.
            KvRequestIdInUseError: its ``kv_request_id`` belongs to a live request.
            ValueError: an id that is live already, no tokens, or ``max_tokens`` below 1.
        """
        if request.request_id in self._lives:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if not len(request.token_ids) or request.max_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        if len(request.token_ids) >= self.max_model_len:
            raise PromptTooLongError(
                f"This model's maximum context length is {self.max_model_len} tokens. "
                f"However, your prompt has {len(request.token_ids)} tokens."
            )
        live = make_live(request, self.config.block_size_tokens, self.root, self.config.output_vocabulary)
        name = live.params.kv_request_id
        if name is not None and self.config.offloads:
            if name in self._kv_request_ids:
                raise KvRequestIdInUseError(f"kv_request_id {name!r} is in use by another request")
            self._kv_request_ids.add(name)
        self._lives[request.request_id] = live
        self._scheduler.add(live)
        self._wake(now_s)

    def abort(self, request_id: str, now_s: float) -> None:
        """The client has gone; unknown ids are ignored.

        Its blocks are free at once, or when the step or load that writes them is over.
        """
        live = self._lives.get(request_id)
        if live is None:
            return
        live.aborted = True
        self._counters.aborted_requests += 1
        self._forget_request(live)
        in_step = any(member is live for member, _ in self._batch)
        if live.status is not Status.LOADING and not in_step:
            self._scheduler.remove(live)
            self._wake(now_s)

    def answer_lookup(
        self, request_id: str, hits: Sequence[bool] | None, now_s: float, *, wait_s: float = 0.0
    ) -> None:
        """The peer's answer to a ``PeerLookup``, in the order of its hashes.

        None says that the peer is dead or unknown: the request waits out the profile's timeout and is
        recomputed. ``wait_s`` is how long the peer's link is busy with others (``PeerAnswer.wait_s``).
        """
        live = self._lives.get(request_id)
        if live is not None:
            self._offload.answer(live, hits, now_s, wait_s)

    def held_in_ram(self, block_hashes: Sequence[bytes]) -> list[bool]:
        """Which blocks a peer could pull now: those readable in RAM, never those in HBM alone."""
        return [self._offload.ram.ready(engine_hash) for engine_hash in block_hashes]

    def serve_lookup(self, block_hashes: Sequence[bytes], now_s: float) -> PeerAnswer:
        """Answer a peer's ``PeerLookup`` and let its pull queue on this engine's outgoing link."""
        return self._offload.serve(block_hashes, now_s)

    def reset_prefix_cache(self, now_s: float, *, reset_external: bool = False) -> bool:
        """Clear HBM (and RAM). Refused while requests hold blocks; the event goes out with the next step."""
        cleared = list(self._scheduler.pool.hashes())
        if not self._scheduler.pool.clear():
            return False
        self._scheduler.events.append(AllBlocksCleared())
        if reset_external:
            cleared += self._offload.clear()
        for engine_hash in cleared:
            self._forget_unless_held(engine_hash)
        if self._lives:
            self._wake(now_s)
        return True

    def sleep(self, now_s: float) -> bool:
        """Stop scheduling and drop HBM; its event waits for the first step after ``wake_up``."""
        if not self.reset_prefix_cache(now_s):
            return False
        self.asleep = True
        return True

    def wake_up(self, now_s: float) -> None:
        """Schedule again."""
        self.asleep = False
        self._wake(now_s)

    # The clock

    def next_event_s(self) -> float | None:
        """When ``advance`` has something to do; None while nothing is under way."""
        own = self._step_end_s if self._step_end_s is not None else self._wake_s
        planned = self._agenda.next_s
        if own is None or planned is None:
            return planned if own is None else own
        return min(own, planned)

    def advance(self, now_s: float) -> StepOutput:
        """Do everything due by ``now_s``, in order of time."""
        out = StepOutput()
        while (due_s := self.next_event_s()) is not None and due_s <= now_s:
            self._agenda.run(due_s)
            if self._step_end_s is not None and self._step_end_s <= due_s:
                self._end_step(due_s, out)
            if self._offload.woken or self._scheduler.woken:
                self._offload.woken = self._scheduler.woken = False
                self._wake(due_s)
            if self._step_end_s is None:
                self._start_step(due_s, out)
        return out

    def _wake(self, now_s: float) -> None:
        self._wake_s = now_s if self._wake_s is None else min(self._wake_s, now_s)

    def _start_step(self, now_s: float, out: StepOutput) -> None:
        if self._wake_s is not None and self._wake_s <= now_s:
            self._wake_s = None
            self._batch = [] if self.asleep else self._scheduler.schedule(now_s)
            out.lookups.extend(self._offload.lookups)
            self._offload.lookups.clear()
        if not self._batch:
            if self._offload.events:
                self._publish(out)  # an idle vLLM steps for its connector's completions
            return
        duration_s = self.profile.step_base_s
        for live, count in self._batch:
            if count == 1 and live.computed >= live.prompt_tokens:
                duration_s += self.profile.decode_s(live.computed)
            else:
                duration_s += self.profile.prefill_s(count, live.computed)
        self._step_end_s = now_s + duration_s
        self._counters.steps += 1
        for live, count in self._batch:
            self._offload.store(live, live.computed + count, self._step_end_s)

    def _end_step(self, now_s: float, out: StepOutput) -> None:
        batch, self._batch, self._step_end_s = self._batch, [], None
        for live, count in batch:
            live.computed += count
            if live.aborted:
                self._scheduler.remove(live)
            elif live.computed == live.num_tokens:
                self._sample(live, now_s, out)
        self._publish(out)
        if self._lives:
            self._wake(now_s)

    def _sample(self, live: Live, now_s: float, out: StepOutput) -> None:
        request = live.request
        token_id = live.text.token(live.output_tokens)
        live.tokens.append(token_id)
        if live.num_tokens % self.config.block_size_tokens == 0:
            live.grow_hashes()
        self._counters.generation_tokens += 1
        stop = live.output_tokens == request.stop_after_tokens
        finished = stop or live.output_tokens >= request.max_tokens or live.num_tokens >= self.max_model_len
        out.tokens.append(TokenOutput(request.request_id, token_id, finished, live.output_tokens == 1))
        if not finished:
            return
        usage = SimUsage(
            live.prompt_tokens, live.output_tokens, live.cached_tokens, dict(live.cached_by_tier)
        )
        out.finished.append(Finished(request.request_id, usage, "stop" if stop else "length"))
        self._counters.finished_requests += 1
        self._offload.store(live, max(live.prompt_tokens, live.num_tokens - 1), now_s)
        self._scheduler.remove(live)
        self._forget_request(live)

    def _publish(self, out: StepOutput) -> None:
        events = [*self._scheduler.events, *self._offload.events]
        self._scheduler.events, self._offload.events = [], []
        if events:
            out.kv_batches.append(events)

    def _forget_request(self, live: Live) -> None:
        del self._lives[live.request.request_id]
        if live.params.kv_request_id is not None:
            self._kv_request_ids.discard(live.params.kv_request_id)

    def _forget_unless_held(self, engine_hash: bytes) -> None:
        held = (
            self._scheduler.pool.holds(engine_hash)
            or self._offload.ram.known(engine_hash)
            or (self._storage is not None and engine_hash in self._storage)
        )
        if not held:
            self._book.drop(engine_hash)

    # What the engine knows

    def metrics(self) -> SimMetrics:
        """Gauges and counters now. The counters go on counting: copy what must not change."""
        return SimMetrics(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            kv_cache_usage=self._scheduler.pool.usage,
            ram_blocks=len(self._offload.ram),
            storage_blocks=len(self._storage) if self._storage is not None else 0,
            asleep=self.asleep,
            counters=self._counters,
        )

    def held_blocks(self) -> list[BlockTruth]:
        """Every block held on any tier: the truth an index built from events can be compared with."""
        hbm = self._scheduler.pool.hashes()
        ram = set(self._offload.ram.ready_hashes())
        storage = set(self._storage.hashes()) if self._storage is not None else set()
        return [self._truth(h, hbm.get(h, 0), h in ram, h in storage) for h in sorted({*hbm, *ram, *storage})]

    def _truth(self, engine_hash: bytes, hbm_copies: int, in_ram: bool, in_storage: bool) -> BlockTruth:
        identity = self._book.get(engine_hash)
        return BlockTruth(
            block_hash=engine_hash,
            parent=identity.parent if identity else None,
            token_ids=identity.token_ids if identity else array("I"),
            extra_keys=identity.extra_keys if identity else None,
            lora_name=identity.lora_name if identity else None,
            hbm_copies=hbm_copies,
            in_ram=in_ram,
            in_storage=in_storage,
        )
