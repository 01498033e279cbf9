# SPDX-License-Identifier: Apache-2.0
"""The simulated engine: a discrete-event core whose clock is an argument. No I/O, no randomness.

    submit / abort / answer_lookup        say what happened, at a time
    next_event_s                          when advance has something to do; None when idle
    advance(now_s)                        do it, in order of time; returns what came out

Blocks are announced when their tokens are scheduled and published when the step ends, GPU events before those
of the lower tiers, one message per step (vLLM 0.32, ``Scheduler.update_from_output``). Times never go
backwards. Memory is bounded by the tiers' capacity and the requests in flight.

Steps from which nothing comes out are *silent*: only time passes. A run of them is planned at once and costs one
addition a step; whatever happens within cuts it after the step under way. With ``every_token`` no step is silent,
and the results are the same.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence

from engine_ext.sim.agenda import Agenda
from engine_ext.sim.book import BlockBook
from engine_ext.sim.config import SimConfig
from engine_ext.sim.decoding import DecodeSet
from engine_ext.sim.errors import KvRequestIdInUseError, PromptTooLongError
from engine_ext.sim.events import AllBlocksCleared
from engine_ext.sim.hashing import root_hash
from engine_ext.sim.network import OwnPeerLinks, PeerNetwork
from engine_ext.sim.noise import Noise
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
from engine_ext.sim.scheduler import Batch, Queue, Scheduler
from engine_ext.sim.tiers import StorageTier


class SimEngine:
    """One engine: scheduler, HBM pool and lower tiers."""

    def __init__(
        self,
        config: SimConfig,
        profile: SimProfile,
        storage: StorageTier | None = None,
        *,
        network: PeerNetwork | None = None,
        noise: Noise | None = None,
        evicted: Callable[[bytes], None] | None = None,
        every_token: bool = True,
    ) -> None:
        """``storage`` lets several engines share one store; otherwise ``config.storage_blocks`` makes one.

        Args:
            config: what the engine is.
            profile: how long things take.
            storage: see above.
            network: carries its pulls; without one it has links of its own.
            noise: makes its times uneven; without it they are those of the profile.
            evicted: told of each block that no tier holds any more because others took its place.
            every_token: put out every token. Otherwise only the first and the last of each answer, and no step
                that brings nothing else is an event.
        """
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
        self._noise = noise
        self._told_of_evicted = evicted
        self._offload = Offloading(
            config=config,
            profile=profile,
            agenda=self._agenda,
            book=self._book,
            counters=self._counters,
            storage=storage,
            network=network or OwnPeerLinks(profile.peer_bytes_per_s, self._agenda),
            noise=noise,
            forget=self._forget_unless_held,
            evicted=self._evicted,
        )
        self._every_token = every_token
        self._decoding = DecodeSet(config.block_size_tokens, self.max_model_len, every_token=every_token)
        self._scheduler = Scheduler(
            config=config,
            offload=self._offload,
            book=self._book,
            counters=self._counters,
            decoding=self._decoding,
            evicted=self._evicted,
        )
        self._lives: dict[str, Live] = {}
        self._kv_request_ids: set[str] = set()
        self._batch = Batch()
        self._ends_s: list[float] = []
        """Ends of the step under way and of the silent ones planned behind it."""
        self._visible_s = 0.0
        """End of the next step that brings something."""
        self._leaving: list[Live] = []
        """Members of the decode set that were aborted during the step under way."""
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
            self._offload.server.prefill_begins(live)
        self._interrupt(now_s)
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
        self._interrupt(now_s)
        live.aborted = True
        self._counters.aborted_requests += 1
        self._forget_request(live)
        if live.decoding and self._batch.decodes:
            self._leaving.append(live)
            return
        in_step = any(member is live for member, _ in self._batch.parts)
        if live.status is not Status.LOADING and not in_step:
            self._scheduler.remove(live, now_s)
            self._wake(now_s)

    def answer_lookup(
        self, request_id: str, hits: Sequence[bool | None] | None, now_s: float, *, wait_s: float = 0.0
    ) -> None:
        """The peer's answer to a ``PeerLookup``, in the order of its hashes; may come in parts (``PeerAnswer``).

        None says that the peer is dead or unknown: the request waits out the profile's timeout and is
        recomputed. ``wait_s`` is how long the peer's link is busy with others (``PeerAnswer.wait_s``).
        """
        live = self._lives.get(request_id)
        if live is not None:
            self._offload.puller.answer(live, hits, now_s, wait_s)

    def held_in_ram(self, block_hashes: Sequence[bytes]) -> list[bool]:
        """Which blocks a peer could pull now: those readable in RAM, never those in HBM alone."""
        return [self._offload.ram.ready(engine_hash) for engine_hash in block_hashes]

    def serve_lookup(
        self,
        block_hashes: Sequence[bytes],
        now_s: float,
        *,
        ticket: Hashable = None,
        prefill: str | None = None,
    ) -> PeerAnswer:
        """Answer a peer's ``PeerLookup``; what is not known yet follows in ``StepOutput.replies`` under ``ticket``.

        ``prefill``: the ``kv_request_id`` of a lookup that ``waits``.
        """
        self._catch_up(now_s)
        return self._offload.server.ask(ticket, block_hashes, prefill, now_s)

    def reset_prefix_cache(self, now_s: float, *, reset_external: bool = False) -> bool:
        """Clear HBM (and RAM). Refused while requests hold blocks; the event goes out with the next step."""
        cleared = list(self._scheduler.pool.hashes())
        if not self._scheduler.pool.clear():
            return False
        self._scheduler.events.append(AllBlocksCleared())
        if reset_external:
            cleared += self._offload.clear(now_s)
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
        return self._next_s(self._visible_s)

    def advance(self, now_s: float) -> StepOutput:
        """Do everything due by ``now_s``, in order of time."""
        out = StepOutput()
        while (
            due_s := self._next_s(self._ends_s[-1] if self._ends_s else 0.0)
        ) is not None and due_s <= now_s:
            if self._agenda.run(due_s):
                self._cut(bisect_left(self._ends_s, due_s))
            if self._ends_s and self._ends_s[-1] <= due_s:
                self._end_steps(out)
            if self._offload.woken or self._scheduler.woken:
                self._offload.woken = self._scheduler.woken = False
                self._wake(due_s)
            if not self._ends_s:
                self._start_step(due_s, out)
        out.replies.extend(self._offload.server.replies)
        self._offload.server.replies.clear()
        return out

    def _next_s(self, step_end_s: float) -> float | None:
        own = step_end_s if self._ends_s else self._wake_s
        planned = self._agenda.next_s
        if own is None or planned is None:
            return planned if own is None else own
        return min(own, planned)

    def _wake(self, now_s: float) -> None:
        self._wake_s = now_s if self._wake_s is None else min(self._wake_s, now_s)

    def _start_step(self, now_s: float, out: StepOutput) -> None:
        if self._wake_s is not None and self._wake_s <= now_s:
            self._wake_s = None
            self._batch = Batch() if self.asleep else self._scheduler.schedule(now_s)
            out.lookups.extend(self._offload.puller.lookups)
            self._offload.puller.lookups.clear()
        batch = self._batch
        if not batch:
            if self._offload.events:
                self._publish(out)  # an idle vLLM steps for its connector's completions
            return
        end_s = now_s + self._step_s(batch) * self._noise_of(1)[0]
        self._ends_s = [end_s]
        self._visible_s = end_s
        for live in batch.due:
            self._offload.store(live, live.computed + 1, end_s)
        for live, count in batch.parts:
            self._offload.store(live, live.computed + count, end_s)
        if not batch.parts and not batch.due:
            self._plan_silent_steps()

    def _step_s(self, batch: Batch) -> float:
        sequences, context, prefill_s = batch.decodes, 0, 0.0
        if sequences:
            context = self._decoding.context_tokens
        for live, count in batch.parts:
            if count == 1 and live.computed >= live.prompt_tokens:
                sequences += 1
                context += live.computed
            else:
                prefill_s += self.profile.prefill_s(count, live.computed)
        return self.profile.step_s(sequences, context) + prefill_s

    def _plan_silent_steps(self) -> None:
        """Behind a silent step under way: those that follow it, and when the one after them ends."""
        sequences, context = len(self._decoding), self._decoding.context_tokens
        fixed_s, per_token_s = self.profile.step_s(sequences, 0), self.profile.decode_s_per_context_token
        end_s = self._ends_s[0]
        factors = self._noise_of(self._decoding.silent_steps() + 1)
        for factor in factors[1:-1]:
            context += sequences
            end_s += (fixed_s + per_token_s * context) * factor
            self._ends_s.append(end_s)
        self._visible_s = end_s
        if self._scheduler.queue is Queue.QUIET and self._scheduler.can_extend(self._decoding.due_next()):
            context += sequences
            self._visible_s = end_s + (fixed_s + per_token_s * context) * factors[-1]

    def _noise_of(self, steps: int) -> Sequence[float]:
        """Factors of the step under way and those behind it."""
        return [1.0] * steps if self._noise is None else self._noise.step_factors(steps)

    def _catch_up(self, now_s: float) -> None:
        """Start the step that follows the silent ones, if they are over by ``now_s``.

        The caller has advanced to everything else.
        """
        if self._ends_s and self._ends_s[-1] <= now_s and self._ends_s[-1] < self._visible_s:
            end_s = self._ends_s[-1]
            self._end_steps(StepOutput())
            self._start_step(end_s, StepOutput())

    def _interrupt(self, now_s: float) -> None:
        """Something happens that the step after the one under way has to know."""
        self._catch_up(now_s)
        self._cut(bisect_right(self._ends_s, now_s))

    def _cut(self, over: int) -> None:
        """Something happens: ``over`` of the planned steps are over, the one under way is the last of them."""
        if len(self._ends_s) > 1:
            over = min(over, len(self._ends_s) - 1)
            self._take_steps(over)
            self._ends_s = [self._ends_s[over]]
        if self._ends_s:
            self._visible_s = self._ends_s[0]

    def _take_steps(self, steps: int) -> None:
        self._counters.steps += steps
        if self._noise is not None:
            self._noise.steps_taken(steps)
        if self._batch.decodes:
            self._decoding.advance(steps)
            self._counters.generation_tokens += steps * self._batch.decodes

    def _end_steps(self, out: StepOutput) -> None:
        now_s, batch, leaving = self._ends_s[-1], self._batch, self._leaving
        self._take_steps(len(self._ends_s))
        self._counters.generation_tokens -= len(leaving)
        self._ends_s, self._batch, self._leaving = [], Batch(), []
        if leaving:
            batch.due = sorted({*batch.due, *leaving}, key=lambda live: live.order)
        for live in batch.due:
            self._end_decode(live, now_s, out)
        for live, count in batch.parts:
            live.computed += count
            if live.aborted:
                self._scheduler.remove(live, now_s)
            elif live.computed == live.num_tokens:
                self._sample(live, now_s, out)
        self._publish(out)
        if self._lives:
            self._wake(now_s)

    def _end_decode(self, live: Live, now_s: float, out: StepOutput) -> None:
        """A member of the decode set that was due has its next token."""
        if live.aborted:
            self._scheduler.remove(live, now_s)
            return
        self._decoding.settle(live)
        if not self._finishes(live, now_s, out):
            soon = self._offload.wants_to_store(live, live.computed + 1)
            self._decoding.plan(live, soon=soon)

    def _sample(self, live: Live, now_s: float, out: StepOutput) -> None:
        """A prefill is done: its first token, or, after a preemption, its next."""
        live.tokens.append(live.text.token(live.output_tokens))
        if live.num_tokens % self.config.block_size_tokens == 0:
            live.grow_hashes()
        self._counters.generation_tokens += 1
        if not self._finishes(live, now_s, out):
            self._scheduler.decodes(live)

    def _finishes(self, live: Live, now_s: float, out: StepOutput) -> bool:
        """Put out the newest token of a request; whether it was the last one."""
        request, count = live.request, live.output_tokens
        stop = count == request.stop_after_tokens
        finished = stop or count >= request.max_tokens or live.num_tokens >= self.max_model_len
        if finished or count == 1 or self._every_token:
            out.tokens.append(TokenOutput(request.request_id, live.tokens[-1], finished, count == 1))
        if not finished:
            return False
        usage = SimUsage(live.prompt_tokens, count, live.cached_tokens, dict(live.cached_by_tier))
        reason = "stop" if stop else "length"
        out.finished.append(Finished(request.request_id, usage, reason, live.computed_blocks()))
        self._counters.finished_requests += 1
        self._offload.store(live, max(live.prompt_tokens, live.num_tokens - 1), now_s)
        self._scheduler.remove(live, now_s)
        self._forget_request(live)
        return True

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
        if self.config.track_identity and not self._holds(engine_hash):
            self._book.drop(engine_hash)

    def _evicted(self, engine_hash: bytes) -> None:
        self._forget_unless_held(engine_hash)
        if self._told_of_evicted is not None and not self._holds(engine_hash):
            self._told_of_evicted(engine_hash)

    def _holds(self, engine_hash: bytes) -> bool:
        """Whether any tier has the block."""
        return (
            self._scheduler.pool.holds(engine_hash)
            or self._offload.ram.known(engine_hash)
            or (self._storage is not None and engine_hash in self._storage)
        )

    # What the engine knows

    def metrics(self, now_s: float | None = None) -> SimMetrics:
        """Gauges and counters now. The counters go on counting: copy what must not change.

        Without ``every_token`` the counters of steps and tokens lag behind by the silent steps under way, and the
        gauges need ``now_s``.
        """
        if now_s is not None:
            self._catch_up(now_s)
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
