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

from collections.abc import Callable, Hashable, Sequence

from engine_ext.sim.agenda import Agenda
from engine_ext.sim.book import BlockBook
from engine_ext.sim.config import SimConfig
from engine_ext.sim.decoding import DecodeSet
from engine_ext.sim.errors import KvRequestIdInUseError, PromptTooLongError
from engine_ext.sim.events import AllBlocksCleared
from engine_ext.sim.hashing import root_hash
from engine_ext.sim.holdings import Holdings
from engine_ext.sim.network import OwnPeerLinks, PeerNetwork
from engine_ext.sim.noise import Noise
from engine_ext.sim.offload import Offloading
from engine_ext.sim.output import (
    BlockTruth,
    PeerAnswer,
    SimCounters,
    SimMetrics,
    StepOutput,
)
from engine_ext.sim.pool import HbmPool
from engine_ext.sim.profile import SimProfile
from engine_ext.sim.request import Live, SimRequest, make_live
from engine_ext.sim.scheduler import Scheduler
from engine_ext.sim.stepper import Stepper
from engine_ext.sim.tiers import RamTier, StorageTier
from engine_ext.sim.timeline import Timeline


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
        """An idle engine.

        Args:
            config: what the engine is.
            profile: how long things take.
            storage: lets several engines share one store; otherwise ``config.storage_blocks`` makes one.
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
        if storage is None and config.storage_blocks:
            storage = StorageTier(config.storage_blocks)
        self._storage = storage
        self._counters = SimCounters()
        self._pool, self._ram = HbmPool(config.hbm_blocks), RamTier(config.ram_blocks)
        book, agenda = BlockBook(config.track_identity), Agenda()
        self._holdings = Holdings(self._pool, self._ram, storage, book, evicted)
        self._offload = Offloading(
            config=config,
            profile=profile,
            agenda=agenda,
            book=book,
            counters=self._counters,
            ram=self._ram,
            storage=storage,
            holdings=self._holdings,
            network=network or OwnPeerLinks(profile.peer_bytes_per_s, agenda),
            noise=noise,
        )
        decoding = DecodeSet(config.block_size_tokens, self.max_model_len, every_token=every_token)
        self._scheduler = Scheduler(
            config=config,
            pool=self._pool,
            offload=self._offload,
            book=book,
            counters=self._counters,
            decoding=decoding,
            holdings=self._holdings,
        )
        self._lives: dict[str, Live] = {}
        self._kv_request_ids: set[str] = set()
        self._stepper = Stepper(
            profile=profile,
            agenda=agenda,
            scheduler=self._scheduler,
            offload=self._offload,
            decoding=decoding,
            counters=self._counters,
            timeline=Timeline(profile, noise),
            max_model_len=self.max_model_len,
            every_token=every_token,
            is_busy=lambda: bool(self._lives),
            ended=self._forget_request,
        )

    @property
    def asleep(self) -> bool:
        """Whether it schedules nothing."""
        return self._stepper.asleep

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
        live = make_live(
            request,
            self.config.block_size_tokens,
            self.root,
            self.config.output_vocabulary,
            extension=self.config.extension,
            now_s=now_s,
        )
        name = live.params.kv_request_id
        if name is not None and self.config.offloads:
            if name in self._kv_request_ids:
                raise KvRequestIdInUseError(f"kv_request_id {name!r} is in use by another request")
            self._kv_request_ids.add(name)
            self._offload.server.prefill_begins(live)
        self._stepper.interrupt(now_s)
        self._lives[request.request_id] = live
        self._scheduler.add(live)
        self._stepper.wake(now_s)

    def abort(self, request_id: str, now_s: float) -> None:
        """The client has gone; unknown ids are ignored.

        Its blocks are free at once, or when the step or load that writes them is over.
        """
        live = self._lives.get(request_id)
        if live is None:
            return
        self._stepper.abort(live, now_s)
        self._counters.aborted_requests += 1
        self._forget_request(live)

    def answer_lookup(
        self,
        request_id: str,
        hits: Sequence[bool | None] | None,
        now_s: float,
        *,
        wait_s: float = 0.0,
        source: int = 0,
    ) -> None:
        """The peer's answer to a ``PeerLookup``, in the order of its hashes; may come in parts (``PeerAnswer``).

        None says that the peer is dead or unknown: the request waits out the profile's timeout and is
        recomputed. ``wait_s`` is how long the peer's link is busy with others (``PeerAnswer.wait_s``); ``source`` is that of the
        ``PeerLookup``.
        """
        live = self._lives.get(request_id)
        if live is not None:
            self._offload.puller.answer(live, source, hits, now_s, wait_s)

    def held_in_ram(self, block_hashes: Sequence[bytes]) -> list[bool]:
        """Which blocks a peer could pull now: those readable in RAM, never those in HBM alone."""
        return [self._ram.ready(engine_hash) for engine_hash in block_hashes]

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
        self._stepper.catch_up(now_s)
        return self._offload.server.ask(ticket, block_hashes, prefill, now_s)

    def reset_prefix_cache(self, now_s: float, *, reset_external: bool = False) -> bool:
        """Clear HBM (and RAM). Refused while requests hold blocks; the event goes out with the next step."""
        cleared = list(self._pool.hashes())
        if not self._pool.clear():
            return False
        self._scheduler.events.append(AllBlocksCleared())
        if reset_external:
            cleared += self._offload.clear(now_s)
        for engine_hash in cleared:
            self._holdings.forget(engine_hash)
        if self._lives:
            self._stepper.wake(now_s)
        return True

    def sleep(self, now_s: float) -> bool:
        """Stop scheduling and drop HBM; its event waits for the first step after ``wake_up``."""
        if not self.reset_prefix_cache(now_s):
            return False
        self._stepper.asleep = True
        return True

    def wake_up(self, now_s: float) -> None:
        """Schedule again."""
        self._stepper.asleep = False
        self._stepper.wake(now_s)

    # The clock

    def next_event_s(self) -> float | None:
        """When ``advance`` has something to do; None while nothing is under way."""
        return self._stepper.next_event_s()

    def advance(self, now_s: float) -> StepOutput:
        """Do everything due by ``now_s``, in order of time."""
        return self._stepper.advance(now_s)

    def _forget_request(self, live: Live) -> None:
        del self._lives[live.request.request_id]
        if live.params.kv_request_id is not None:
            self._kv_request_ids.discard(live.params.kv_request_id)

    # What the engine knows

    def metrics(self, now_s: float | None = None) -> SimMetrics:
        """Gauges and counters now. The counters go on counting: copy what must not change.

        Without ``every_token`` the counters of steps and tokens lag behind by the silent steps under way, and the
        gauges need ``now_s``.
        """
        if now_s is not None:
            self._stepper.catch_up(now_s)
        return SimMetrics(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            kv_cache_usage=self._pool.usage,
            ram_blocks=len(self._ram),
            storage_blocks=len(self._storage) if self._storage is not None else 0,
            asleep=self.asleep,
            counters=self._counters,
        )

    def held_blocks(self) -> list[BlockTruth]:
        """Every block held on any tier: the truth an index built from events can be compared with."""
        return self._holdings.blocks()
