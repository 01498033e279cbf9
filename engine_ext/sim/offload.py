# SPDX-License-Identifier: Apache-2.0
"""Everything below HBM: lookup, stores, loads, pulls from a peer, storage.

Lookup order of one block (vLLM 0.32, ``tiering/manager.py`` ``lookup``): RAM; then the peer the request names for it;
then storage. A block found outside RAM is first brought into RAM, and the request looks again when it is
there; only a prefix that is ready in RAM is loaded into HBM. A request whose lookup is open is *deferred*: it
keeps its place in the queue and takes no part in a step. External hits may reach all n prompt tokens
(``_lookup_complete_chunks`` caps at ``num_tokens``, not at n - 1); the scheduler then computes the last one again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine_ext.sim.agenda import Action, Agenda
from engine_ext.sim.book import BlockBook
from engine_ext.sim.config import SimConfig
from engine_ext.sim.events import Medium
from engine_ext.sim.holdings import Holdings
from engine_ext.sim.links import SharedLink
from engine_ext.sim.lower_events import LowerTierEvents
from engine_ext.sim.network import PeerNetwork
from engine_ext.sim.noise import Noise
from engine_ext.sim.output import SimCounters
from engine_ext.sim.profile import SimProfile
from engine_ext.sim.pulling import PeerClient
from engine_ext.sim.request import Live, Status, Tier
from engine_ext.sim.serving import PeerServer
from engine_ext.sim.tiers import RamTier, StorageTier


@dataclass(slots=True)
class _Scan:
    """One walk along a prompt's blocks."""

    hits: int = 0
    open: bool = False
    """Some block of the prefix is not readable yet, or its place not known yet."""
    ask: dict[int, list[bytes]] = field(default_factory=dict)
    """By number of the source, as the next."""
    from_peer: dict[int, list[bytes]] = field(default_factory=dict)
    from_storage: list[bytes] = field(default_factory=list)
    own: frozenset[bytes] | None = None
    """The blocks of the prompt: none is given up for another of them. Made when first needed."""


class Offloading:
    """Lower tiers of one engine. ``events`` is drained by the stepper."""

    def __init__(
        self,
        *,
        config: SimConfig,
        profile: SimProfile,
        agenda: Agenda,
        book: BlockBook,
        counters: SimCounters,
        ram: RamTier,
        storage: StorageTier | None,
        holdings: Holdings,
        network: PeerNetwork,
        noise: Noise | None,
    ) -> None:
        self._config = config
        self._profile = profile
        self._agenda = agenda
        self._book = book
        self._counters = counters
        self._noise = noise
        self._holdings = holdings
        self.ram = ram
        self.storage = storage
        self.events = LowerTierEvents(config, book)
        self.woken = False
        """Something a deferred request waits for has happened."""
        self._block_bytes = profile.kv_bytes_per_token * config.block_size_tokens
        self.puller = PeerClient(config, profile, agenda, network, counters, lambda live: self._wake([live]))
        self.server = PeerServer(profile, agenda, self.ram, network, self._block_bytes)
        self._to_hbm = SharedLink(profile.ram_load_bytes_per_s, agenda)
        self._from_hbm = SharedLink(profile.ram_store_bytes_per_s, agenda)
        self._storage_read = SharedLink(profile.storage_read_bytes_per_s, agenda)
        self._storage_write = SharedLink(profile.storage_write_bytes_per_s, agenda)
        self._in_hbm_load: set[bytes] = set()
        self._deferred: dict[Live, None] = {}
        self._generation = 0

    # Lookup

    def find(self, live: Live, hbm_blocks: int, now_s: float) -> int | None:
        """Blocks behind the HBM hit that can be loaded from RAM now; None defers the request."""
        end = self._load_end(live, hbm_blocks)
        if end <= hbm_blocks:
            return 0
        scan = _Scan()
        for index in range(hbm_blocks, end):
            if not self._look(live, index, scan):
                break
        for number, keys in scan.ask.items():
            if number not in live.questions:
                self.puller.ask(live, number, keys, now_s)
        for number, keys in scan.from_peer.items():
            self._bring(live, keys, now_s, number)
        self._bring(live, scan.from_storage, now_s)
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

    def _look(self, live: Live, index: int, scan: _Scan) -> bool:
        """Look one block up; False ends the prefix."""
        engine_hash = live.hashes[index]
        if self.ram.known(engine_hash):
            scan.hits += 1
            scan.open |= not self.ram.ready(engine_hash)
            return True
        unknown = False
        number = live.source_of(index) if live.params.peer_allowed else None
        if number is not None:
            held = live.answers.get(engine_hash)
            if held:
                return self._make_room(live, engine_hash, scan.from_peer.setdefault(number, []), scan)
            if held is None:
                scan.ask.setdefault(number, []).append(engine_hash)
                unknown = True
                if live.params.waits_for_prefill:
                    scan.open = True
                    return True
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

    # RAM and storage

    def _carry(
        self, link: SharedLink, blocks: int, now_s: float, done: Action, latency_s: float = 0.0
    ) -> None:
        """Move blocks over a link; ``done`` is called ``latency_s`` behind their last byte."""

        def ended(end_s: float) -> None:
            self._agenda.at(end_s + latency_s, done)

        link.carry(self._size_bytes(blocks), ended, now_s)

    def _size_bytes(self, blocks: int) -> float:
        """What blocks weigh on a link; noise makes a transfer slower or faster by making it larger or smaller."""
        return blocks * self._block_bytes * (self._noise.transfer_factor() if self._noise else 1.0)

    def _bring(self, live: Live, keys: list[bytes], now_s: float, source: int | None = None) -> None:
        """Move blocks that RAM has made room for from a peer, given its number, or from storage into RAM."""
        if not keys:
            return
        for key in keys:
            live.came_from[key] = Tier.STORAGE if source is None else Tier.PEER
        self._book.note_keys(live, keys)
        arrived = partial(self._arrived, live, keys, self._generation)
        if source is not None:
            self._pull(live, source, keys, arrived, now_s)
            return
        live.moved.storage_read_bytes += len(keys) * self._block_bytes
        self._carry(self._storage_read, len(keys), now_s, arrived, self._profile.storage_latency_s)
        if self.storage is not None:
            self.storage.touch(keys)

    def _pull(self, live: Live, source: int, keys: list[bytes], arrived: Action, now_s: float) -> None:
        live.moved.peer_bytes += len(keys) * self._block_bytes
        failed = partial(self._pull_failed, live, keys, self._generation)
        start_s = max(now_s, live.pull_from_s.get(source, 0.0))
        self.puller.pull(live, source, self._size_bytes(len(keys)), start_s, arrived, failed)

    def _arrived(self, live: Live, keys: list[bytes], generation: int, now_s: float) -> None:
        """Keep what was brought in for a request until it loads: two pulls must not evict each other's blocks."""
        self._written(live, keys, generation, False, now_s)
        if generation == self._generation and live.status is Status.WAITING:
            self.ram.pin(keys)
            live.held.extend(keys)

    def _pull_failed(self, live: Live, keys: list[bytes], generation: int, now_s: float) -> None:
        """The bytes will not come: a miss, and who else waited for them looks again."""
        self._counters.failed_pulls += 1
        live.moved.peer_bytes -= len(keys) * self._block_bytes
        live.answers.update(dict.fromkeys(keys, False))
        if generation == self._generation:
            for key in self.ram.abandon(keys):
                self._holdings.forget(key)
        self.server.look_again(now_s)
        self._wake_all()

    def _let_go(self, live: Live) -> None:
        self.ram.unpin(live.held)
        live.held.clear()

    def store(self, live: Live, computed_tokens: int, start_s: float) -> None:
        """Offload the full blocks among the first ``computed_tokens`` that were not offered yet."""
        if not self.wants_to_store(live, computed_tokens):
            return
        end = self._store_end(live, computed_tokens)
        room = self.ram.prepare(live.hashes[live.next_offload : end])
        if room is None:
            return  # as vLLM: offered again with the next step
        wanted, victims = room
        self._evicted(victims)
        live.next_offload = end
        if wanted:
            self._book.note_keys(live, wanted)
            self._agenda.at(start_s, partial(self._begin_store, live, wanted, self._generation))

    def _begin_store(self, live: Live, keys: list[bytes], generation: int, now_s: float) -> None:
        live.moved.ram_store_bytes += len(keys) * self._block_bytes
        written = partial(self._written, live, keys, generation, True)
        self._carry(self._from_hbm, len(keys), now_s, written, self._profile.ram_latency_s)

    def wants_to_store(self, live: Live, computed_tokens: int) -> bool:
        """Whether ``store`` has something to do, if it finds room."""
        return self._config.offloads and self._store_end(live, computed_tokens) > live.next_offload

    def _store_end(self, live: Live, computed_tokens: int) -> int:
        limit = min(computed_tokens, live.num_tokens)
        if live.params.max_offload_tokens is not None:
            limit = min(limit, live.params.max_offload_tokens)
        if self._config.offload_prompt_only:
            limit = min(limit, live.prompt_tokens)
        return min(limit // self._config.block_size_tokens, len(live.blocks))

    def _written(self, live: Live, keys: list[bytes], generation: int, cascade: bool, now_s: float) -> None:
        if generation != self._generation:
            return
        written = self.ram.complete(keys)
        self.events.stored(written, Medium.CPU)
        if cascade and self.storage is not None:
            live.moved.storage_write_bytes += len(written) * self._block_bytes
            on_disk = partial(self._on_disk, written)
            latency_s = self._profile.storage_latency_s
            self._carry(self._storage_write, len(written), now_s, on_disk, latency_s)
        self.server.stored(live, written, now_s)
        self._wake_all()

    def _on_disk(self, keys: list[bytes], _now_s: float) -> None:
        assert self.storage is not None  # noqa: S101 - planned only with a storage tier
        written, evicted = self.storage.store(keys)
        self.events.stored(written, Medium.STORAGE)
        for key in evicted:
            self._holdings.evicted(key)
        self._wake_all()

    def load(self, live: Live, start: int, end: int, now_s: float, done: Callable[[float], None]) -> None:
        """Move blocks ``start`` to ``end`` from RAM to HBM; they cannot be evicted meanwhile."""
        keys = live.hashes[start:end]
        live.next_offload = max(live.next_offload, 0 if live.params.keeps_all_blocks else end)
        self.ram.pin(keys)
        self._let_go(live)
        self.ram.touch(keys)
        self._in_hbm_load.update(keys)
        live.moved.ram_load_bytes += len(keys) * self._block_bytes
        loaded = partial(self._loaded, live, keys, self._generation, now_s, done)
        self._carry(self._to_hbm, len(keys), now_s, loaded, self._profile.ram_latency_s)

    def _loaded(
        self,
        live: Live,
        keys: list[bytes],
        generation: int,
        begun_s: float,
        done: Callable[[float], None],
        now_s: float,
    ) -> None:
        live.moved.promotions += 1
        live.moved.promotion_s += now_s - begun_s
        if generation == self._generation:
            self.ram.unpin(keys)
        self._in_hbm_load.difference_update(keys)
        done(now_s)
        self._wake_all()

    def finish(self, live: Live, now_s: float) -> None:
        """A request has ended: its blocks were used just now, tail first to go."""
        self.puller.forget(live)
        self._let_go(live)
        if self._config.offloads:
            self.ram.touch(live.hashes)
            self.server.prefill_ends(live, now_s)

    def clear(self, now_s: float) -> list[bytes]:
        """Forget RAM without telling anyone, as vLLM's connector reset does; returns what it held."""
        held = self.ram.ready_hashes()
        self._generation += 1
        self.ram.clear()
        self.server.clear()
        self.server.look_again(now_s)
        return held

    # Events and waking

    def _evicted(self, victims: list[bytes]) -> None:
        if victims:
            self.events.removed(victims)
            for key in victims:
                self._holdings.evicted(key)

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
        self._wake([live for live in self._deferred if not live.questions or live.status is Status.FINISHED])
