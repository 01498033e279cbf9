# SPDX-License-Identifier: Apache-2.0
"""Everything below HBM: lookup, stores, loads, pulls from a peer, storage.

Lookup order of one block (vLLM 0.32, ``tiering/manager.py`` ``lookup``): RAM; then the peer the request names;
then storage. A block found outside RAM is first brought into RAM, and the request looks again when it is
there; only a prefix that is ready in RAM is loaded into HBM. A request whose lookup is open is *deferred*: it
keeps its place in the queue and takes no part in a step. External hits may reach all n prompt tokens
(``_lookup_complete_chunks`` caps at ``num_tokens``, not at n - 1); the scheduler then computes the last one again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine_ext.sim.agenda import Agenda
from engine_ext.sim.book import BlockBook
from engine_ext.sim.config import SimConfig
from engine_ext.sim.events import FULL_ATTENTION, BlockRemoved, BlockStored, KvEvent, Medium
from engine_ext.sim.output import PeerAnswer, PeerLookup, SimCounters
from engine_ext.sim.profile import SimProfile
from engine_ext.sim.request import Live, Status, Tier
from engine_ext.sim.tiers import Link, RamTier, StorageTier

_NO_TOKENS: array[int] = array("I")


@dataclass(slots=True)
class _Scan:
    """One walk along a prompt's blocks."""

    hits: int = 0
    open: bool = False
    """Some block of the prefix is not readable yet, or its place not known yet."""
    ask: list[bytes] = field(default_factory=list)
    from_peer: list[bytes] = field(default_factory=list)
    from_storage: list[bytes] = field(default_factory=list)
    own: frozenset[bytes] | None = None
    """The blocks of the prompt: none is given up for another of them. Made when first needed."""


class Offloading:
    """Lower tiers of one engine. ``events`` and ``lookups`` are drained by the core."""

    def __init__(
        self,
        *,
        config: SimConfig,
        profile: SimProfile,
        agenda: Agenda,
        book: BlockBook,
        counters: SimCounters,
        storage: StorageTier | None,
        forget: Callable[[bytes], None],
    ) -> None:
        """``forget`` is told of every block that a lower tier let go."""
        self._config = config
        self._profile = profile
        self._agenda = agenda
        self._book = book
        self._counters = counters
        self._forget = forget
        self.ram = RamTier(config.ram_blocks)
        self.storage = storage
        self.events: list[KvEvent] = []
        self.lookups: list[PeerLookup] = []
        self.woken = False
        """Something a deferred request waits for has happened."""
        self._block_bytes = profile.kv_bytes_per_token * config.block_size_tokens
        self._to_hbm = Link(profile.ram_load_bytes_per_s)
        self._from_hbm = Link(profile.ram_store_bytes_per_s)
        self._peer_in = Link(profile.peer_bytes_per_s)
        self._peer_out = Link(profile.peer_bytes_per_s)
        self._storage_read = Link(profile.storage_read_bytes_per_s)
        self._storage_write = Link(profile.storage_write_bytes_per_s)
        self._ready_at_s: dict[bytes, float] = {}
        self._in_hbm_load: set[bytes] = set()
        self._deferred: dict[Live, None] = {}
        self._sessions: set[tuple[str, int]] = set()
        self._generation = 0

    # Lookup

    def find(self, live: Live, hbm_blocks: int, now_s: float) -> int | None:
        """Blocks behind the HBM hit that can be loaded from RAM now; None defers the request."""
        end = self._load_end(live, hbm_blocks)
        if end <= hbm_blocks:
            return 0
        scan = _Scan()
        for engine_hash in live.hashes[hbm_blocks:end]:
            if not self._look(live, engine_hash, scan):
                break
        if scan.ask and live.asked is None:
            self._ask(live, scan.ask, now_s)
        self._bring(live, scan.from_peer, Tier.PEER, max(now_s, live.pull_from_s))
        self._bring(live, scan.from_storage, Tier.STORAGE, now_s)
        ready = live.hashes[hbm_blocks : hbm_blocks + scan.hits]
        if scan.open or any(engine_hash in self._in_hbm_load for engine_hash in ready):
            self._defer(live)
            return None
        if not scan.hits:
            self._let_go(live)
        return scan.hits

    def _load_end(self, live: Live, hbm_blocks: int) -> int:
        end = len(live.hashes)
        cap = live.params.max_load_tokens
        if cap is None:
            return end
        size = self._config.block_size_tokens
        return min(end, (hbm_blocks * size + cap) // size)

    def _look(self, live: Live, engine_hash: bytes, scan: _Scan) -> bool:
        """Look one block up; False ends the prefix."""
        if self.ram.known(engine_hash):
            scan.hits += 1
            scan.open |= not self.ram.ready(engine_hash)
            return True
        unknown = False
        if live.params.source is not None and live.params.peer_allowed:
            held = live.answers.get(engine_hash)
            if held:
                return self._make_room(live, engine_hash, scan.from_peer, scan)
            if held is None:
                scan.ask.append(engine_hash)
                unknown = True
        if self.storage is not None and live.params.storage_allowed and engine_hash in self.storage:
            return self._make_room(live, engine_hash, scan.from_storage, scan)
        scan.open |= unknown
        return unknown

    def _make_room(self, live: Live, engine_hash: bytes, batch: list[bytes], scan: _Scan) -> bool:
        if scan.own is None:
            scan.own = frozenset(live.hashes)
        room = self.ram.prepare([engine_hash], keep=scan.own)
        if room is None:
            return False  # vLLM: a promotion that finds RAM full is a miss
        self._evicted(room[1])
        batch.append(engine_hash)
        scan.hits += 1
        scan.open = True
        return True

    # Peers, as the puller

    def _ask(self, live: Live, keys: list[bytes], now_s: float) -> None:
        source = live.params.source
        assert source is not None  # noqa: S101 - only requests with a source get here
        live.asked, live.asked_at_s = keys, now_s
        self._counters.peer_lookups += 1
        timeout = partial(self._take_answer, live, keys, None, 0.0)
        live.timeout = self._agenda.at(now_s + self._profile.peer_timeout_s, timeout)
        if (source.host, source.port) != self._config.p2p_address:
            lookup = PeerLookup(
                live.request.request_id, source.kv_request_id, source.host, source.port, tuple(keys)
            )
            self.lookups.append(lookup)

    def answer(self, live: Live, hits: Sequence[bool] | None, now_s: float, wait_s: float) -> None:
        """The peer has answered; None or silence ends in ``peer_timeout_s`` after the question."""
        source, keys = live.params.source, live.asked
        if source is None or keys is None or hits is None:
            return
        took_s = self._profile.peer_lookup_s
        if (source.host, source.port) not in self._sessions:
            self._sessions.add((source.host, source.port))
            took_s += self._profile.peer_connect_s
        at_s = max(now_s, live.asked_at_s + took_s)
        self._agenda.at(at_s, partial(self._take_answer, live, keys, list(hits), wait_s))

    def _take_answer(
        self, live: Live, keys: list[bytes], hits: list[bool] | None, wait_s: float, now_s: float
    ) -> None:
        if live.asked is not keys:
            return  # answered before, or asked again since
        if hits is None:
            self._counters.peer_timeouts += 1
            hits = []
        live.asked = None
        self._cancel_timeout(live)
        live.pull_from_s = now_s + wait_s
        padded = [*hits, *[False] * (len(keys) - len(hits))]
        live.answers.update(zip(keys, padded, strict=False))
        self._wake([live])

    def _cancel_timeout(self, live: Live) -> None:
        if live.timeout is not None:
            live.timeout.cancel()
            live.timeout = None

    # Peers, as the source

    def serve(self, keys: Sequence[bytes], now_s: float) -> PeerAnswer:
        """Answer another engine's lookup; its pull of the leading hits takes its turn on our link.

        Blocks whose store is under way count as held from the moment it ends, as in vLLM, whose source
        answers a pending store once it is known.
        """
        hits = [self.ram.known(key) for key in keys]
        count = hits.index(False) if False in hits else len(hits)
        held = keys[:count]
        self.ram.touch(held)
        ready_s = max([now_s, *(self._ready_at_s[key] for key in held if key in self._ready_at_s)])
        start_s = max(ready_s, self._peer_out.free_at_s)
        if count:
            self._peer_out.carry(count * self._block_bytes, ready_s)
        return PeerAnswer(hits, start_s - now_s if count else 0.0)

    # RAM and storage

    def _bring(self, live: Live, keys: list[bytes], tier: Tier, start_s: float) -> None:
        """Move blocks that RAM has made room for from a peer or from storage into RAM."""
        if not keys:
            return
        for key in keys:
            live.came_from[key] = tier
        size_bytes = len(keys) * self._block_bytes
        if tier is Tier.PEER:
            done_s = self._peer_in.carry(size_bytes, start_s)
        else:
            done_s = self._storage_read.carry(size_bytes, start_s) + self._profile.storage_latency_s
            if self.storage is not None:
                self.storage.touch(keys)
        self._write(live, keys, done_s, cascade=False)
        self._agenda.at(done_s, partial(self._hold, live, keys, self._generation))

    def _hold(self, live: Live, keys: list[bytes], generation: int, _now_s: float) -> None:
        """Keep what was brought in for a request until it loads: two pulls must not evict each other's blocks."""
        if generation == self._generation and live.status is Status.WAITING:
            self.ram.pin(keys)
            live.held.extend(keys)

    def _let_go(self, live: Live) -> None:
        self.ram.unpin(live.held)
        live.held.clear()

    def store(self, live: Live, computed_tokens: int, start_s: float) -> None:
        """Offload the full blocks among the first ``computed_tokens`` that were not offered yet."""
        if not self._config.offloads:
            return
        limit = min(computed_tokens, live.num_tokens)
        if live.params.max_offload_tokens is not None:
            limit = min(limit, live.params.max_offload_tokens)
        if self._config.offload_prompt_only:
            limit = min(limit, live.prompt_tokens)
        end = min(limit // self._config.block_size_tokens, len(live.blocks))
        if end <= live.next_offload:
            return
        room = self.ram.prepare(live.hashes[live.next_offload : end])
        if room is None:
            return  # as vLLM: offered again with the next step
        wanted, victims = room
        self._evicted(victims)
        live.next_offload = end
        if wanted:
            done_s = self._from_hbm.carry(len(wanted) * self._block_bytes, start_s)
            self._write(live, wanted, done_s + self._profile.ram_latency_s, cascade=True)

    def _write(self, live: Live, keys: list[bytes], done_s: float, *, cascade: bool) -> None:
        for key in keys:
            self._ready_at_s[key] = done_s
        self._book.note_keys(live, keys)
        self._agenda.at(done_s, partial(self._written, keys, self._generation, cascade))

    def _written(self, keys: list[bytes], generation: int, cascade: bool, now_s: float) -> None:
        if generation != self._generation:
            return
        for key in keys:
            self._ready_at_s.pop(key, None)
        written = self.ram.complete(keys)
        self.events.extend(self._stored_event(key, Medium.CPU, None) for key in written)
        if cascade and self.storage is not None:
            size_bytes = len(written) * self._block_bytes
            done_s = self._storage_write.carry(size_bytes, now_s) + self._profile.storage_latency_s
            self._agenda.at(done_s, partial(self._on_disk, written))
        self._wake_all()

    def _on_disk(self, keys: list[bytes], _now_s: float) -> None:
        assert self.storage is not None  # noqa: S101 - planned only with a storage tier
        written, evicted = self.storage.store(keys)
        locality = self._config.storage_locality
        self.events.extend(self._stored_event(key, Medium.STORAGE, locality) for key in written)
        for key in evicted:
            self._forget(key)
        self._wake_all()

    def load(self, live: Live, start: int, end: int, now_s: float, done: Callable[[float], None]) -> None:
        """Move blocks ``start`` to ``end`` from RAM to HBM; they cannot be evicted meanwhile."""
        keys = live.hashes[start:end]
        live.next_offload = max(live.next_offload, 0 if live.params.keeps_all_blocks else end)
        self.ram.pin(keys)
        self._let_go(live)
        self.ram.touch(keys)
        self._in_hbm_load.update(keys)
        done_s = self._to_hbm.carry(len(keys) * self._block_bytes, now_s) + self._profile.ram_latency_s
        self._agenda.at(done_s, partial(self._loaded, keys, self._generation, done))

    def _loaded(
        self, keys: list[bytes], generation: int, done: Callable[[float], None], now_s: float
    ) -> None:
        if generation == self._generation:
            self.ram.unpin(keys)
        self._in_hbm_load.difference_update(keys)
        done(now_s)
        self._wake_all()

    def finish(self, live: Live) -> None:
        """A request has ended: its blocks were used just now, tail first to go."""
        self._cancel_timeout(live)
        self._let_go(live)
        if self._config.offloads:
            self.ram.touch(live.hashes)

    def clear(self) -> list[bytes]:
        """Forget RAM without telling anyone, as vLLM's connector reset does; returns what it held."""
        held = self.ram.ready_hashes()
        self._generation += 1
        self.ram.clear()
        self._ready_at_s.clear()
        return held

    # Events and waking

    def _evicted(self, victims: list[bytes]) -> None:
        if victims:
            self.events.append(BlockRemoved(tuple(victims), Medium.CPU))
            for key in victims:
                self._forget(key)

    def _stored_event(self, key: bytes, medium: Medium, locality: str | None) -> BlockStored:
        identity = self._book.get(key) if self._config.self_describing_events else None
        if identity is None:
            return BlockStored((key,), None, _NO_TOKENS, 0, medium, locality=locality)
        return BlockStored(
            block_hashes=(key,),
            parent=identity.parent,
            token_ids=identity.token_ids,
            block_size_tokens=self._config.block_size_tokens,
            medium=medium,
            lora_id=identity.lora_id,
            lora_name=identity.lora_name,
            spec_kind=FULL_ATTENTION,
            locality=locality,
        )

    def _defer(self, live: Live) -> None:
        live.deferred = True
        self._deferred[live] = None

    def _wake(self, lives: Sequence[Live]) -> None:
        for live in lives:
            live.deferred = False
            self._deferred.pop(live, None)
        self.woken = True

    def _wake_all(self) -> None:
        """Let every deferred request look again, except those whose peer has yet to answer."""
        self._wake([live for live in self._deferred if live.asked is None or live.status is Status.FINISHED])
